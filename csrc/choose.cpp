// See choose.h.
//
// Weights e^((x - largest) / temperature) are floats in [0, 1], whose bit patterns have the order of their values. The
// thresholds of top-k and top-p are found by radix selection, digit by digit, without sorting.
#include "choose.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace pdk {
namespace {

constexpr int DIGIT_BITS = 10, DIGITS = 1 << DIGIT_BITS;

int digit(float weight, int shift) { return std::bit_cast<uint32_t>(weight) >> shift & (DIGITS - 1); }

// Returns the smallest kept weight: the largest weights are kept up to `most` of them or a sum of `mass`, whichever is
// fewer. 0 keeps all. `left` is scratch of `count` floats.
float floor_of(const float* weights, int64_t count, int64_t most, double mass, float* left) {
    uint32_t known = 0;
    for (int shift = 2 * DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
        int64_t counts[DIGITS] = {};
        double sums[DIGITS] = {};
        for (int64_t i = 0; i < count; i++) {
            const int at = digit(weights[i], shift);
            counts[at]++;
            sums[at] += weights[i];
        }
        int at = DIGITS - 1;
        while (at >= 0 && (counts[at] == 0 || (counts[at] < most && sums[at] < mass))) {
            most -= counts[at];
            mass -= sums[at];
            at--;
        }
        if (at < 0) return std::bit_cast<float>(known);  // keeps all weights with this prefix
        known |= static_cast<uint32_t>(at) << shift;
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i++)
            if (digit(weights[i], shift) == at) left[kept++] = weights[i];
        weights = left;
        count = kept;
    }
    return std::bit_cast<float>(known);
}

}  // namespace

int64_t choose(const Kernels& kernels, const float* logits, int64_t count, const pdk_choice& how, float* scratch) {
    const int64_t best = kernels.argmax(logits, count);
    if (how.greedy || !std::isfinite(logits[best])) return best;
    float *weights = scratch, *left = scratch + count;
    const double total = kernels.weigh(logits, count, logits[best], how.temperature, weights);
    const bool by_mass = how.top_p < 1.0f;
    float floor = how.min_p;
    if (by_mass || how.top_k < count) {
        const double mass = by_mass ? how.top_p * total : INFINITY;
        floor = std::fmax(floor, floor_of(weights, count, how.top_k, mass, left));
    }
    const int64_t blocks = (count + CHOICE_BLOCK - 1) / CHOICE_BLOCK;
    float* sums = left;  // the scratch of floor_of is free again
    kernels.keep(weights, count, floor, sums);
    double all = 0.0;
    for (int64_t b = 0; b < blocks; b++) all += sums[b];
    int64_t end = blocks;  // after the last block with a kept weight
    while (end > 0 && !(sums[end - 1] > 0.0f)) end--;
    const double point = how.point * all;
    double below = 0.0;
    int64_t block = 0;
    while (block + 1 < end && below + sums[block] <= point) below += sums[block++];
    int64_t last = best;
    const int64_t stop = std::min(count, (block + 1) * CHOICE_BLOCK);
    for (int64_t i = block * CHOICE_BLOCK; i < stop && below <= point; i++) {
        if (weights[i] > 0.0f) last = i;
        below += weights[i];
    }
    return last;
}

}  // namespace pdk
