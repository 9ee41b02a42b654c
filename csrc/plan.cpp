// See plan.h.
#include "plan.h"

#include <algorithm>
#include <numeric>

namespace pdk {
namespace {

constexpr int64_t SHORTEST = 256;  // keys of a piece of decode, below which cutting costs more than it gains
constexpr int64_t LONG = 512;      // from so many keys on, KV heads that lie side by side are read together
constexpr int64_t WIDEST = 256;    // columns of keys that are read together: what is asked for must stay in the cache
constexpr int64_t QUERY_ROWS = 192;
constexpr int64_t KEYS_AT_ONCE = 128;
constexpr int64_t PARTIAL_HEAD = 16;

// KV heads of a piece of a query that sees so many keys. Before it computes with the first of them it asks for all that
// it begins with, which is worth it where much follows.
int64_t heads_together(int64_t keys, int64_t kv_heads, int64_t group, int64_t dim) {
    if (keys < LONG) return 1;
    int64_t heads = std::max<int64_t>(1, std::min(WIDEST / padded(dim), MAX_GROUP / group));
    while (kv_heads % heads) heads--;
    return heads;
}

// Pieces that so many keys are cut into, none longer than `longest`. As many for each thread, where that makes none too
// short; a query has `copies` of each.
int64_t cuts_of(int64_t keys, int64_t longest, int64_t copies, int threads) {
    const int64_t count = (keys + longest - 1) / longest, even = threads / std::gcd<int64_t>(copies, threads);
    const int64_t rounded = (count + even - 1) / even * even;
    return count > 1 && keys >= rounded * SHORTEST ? rounded : count;
}

}  // namespace

int64_t extend_queries(int64_t group) { return std::max<int64_t>(1, QUERY_ROWS / group); }

int64_t extend_scratch_bytes(int64_t group, int64_t dim) {
    const int64_t rows = extend_queries(group) * group, wide = padded(dim);
    return 2 * KEYS_AT_ONCE * wide * 2 + rows * (KEYS_AT_ONCE * 6 + wide * 4 + 8) + 64 * 8;
}

void Plan::make(const pdk_step& step, int64_t kv_heads, int64_t group, int64_t dim, int64_t window, int threads) {
    pieces.clear();
    splits.clear();
    partials = 0;
    partial_floats = group * (PARTIAL_HEAD + padded(dim));
    int64_t keys_of_all = 0;
    for (int64_t r = 0; r < step.rows; r++) keys_of_all += step.ends[r];
    // Keys of one head, of which each thread would get four times so many.
    const int64_t fair = (keys_of_all * kv_heads / (4 * threads) + KEYS_AT_ONCE - 1) / KEYS_AT_ONCE * KEYS_AT_ONCE;
    const auto begin_of = [&](int64_t position) { return window ? std::max<int64_t>(0, position - window + 1) : 0; };
    const int64_t queries = extend_queries(group);
    for (int64_t r = 0; r < step.rows; r++) {
        const int64_t start = step.starts[r], end = step.ends[r];
        if (end - start > 1) {
            for (int64_t head = 0; head < kv_heads; head++) {
                for (int64_t first = 0; first < end - start; first += queries) {
                    const int64_t last = std::min(first + queries, end - start), begin = begin_of(start + first);
                    const int64_t cost = (last - first) * (start + last - begin);
                    pieces.push_back({{r, head, 1, first, last, begin, start + last, nullptr}, -1, 0, cost});
                }
            }
            continue;
        }
        const int64_t begin = begin_of(start), keys = end - begin;
        const int64_t heads = heads_together(keys, kv_heads, group, dim);
        const int64_t longest = std::max(SHORTEST, heads == 1 ? fair : 2 * fair / heads);
        const int64_t count = threads == 1 ? 1 : cuts_of(keys, longest, kv_heads / heads, threads);
        for (int64_t head = 0; head < kv_heads; head += heads) {
            if (count == 1) {
                pieces.push_back({{r, head, heads, 0, 1, begin, end, nullptr}, -1, 0, keys * heads});
                continue;
            }
            for (int64_t i = 0; i < count; i++) {
                const int64_t from = begin + keys * i / count, to = begin + keys * (i + 1) / count;
                pieces.push_back({{r, head, heads, 0, 1, from, to, nullptr},
                                  static_cast<int64_t>(splits.size()), i, (to - from) * heads});
            }
            splits.push_back({partials, count});
            partials += count * heads;
        }
    }
    std::stable_sort(pieces.begin(), pieces.end(), [](const auto& a, const auto& b) { return a.cost > b.cost; });
    done = std::vector<std::atomic<int32_t>>(splits.size());
}

}  // namespace pdk
