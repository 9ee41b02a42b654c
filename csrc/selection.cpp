// See selection.h.
#include "selection.h"

#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace pdk {
namespace {

constexpr int64_t TOGETHER = 8;               // queries of a piece, which share packed keys
constexpr int64_t PIECE_KEYS = 512;           // keys of a piece, a multiple of the keys of a tile
constexpr int64_t SCORE_BYTES = 16 << 20;     // of a batch, unless one piece has more
static_assert(PIECE_KEYS % MOST_TILE_KEYS == 0);

// Whole numbers in the order of the floats; 0 for NaN.
uint32_t ordered(float x) {
    if (x != x) return 0;
    x += 0.0f;  // -0 is 0
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

}  // namespace

void Selection::make(const pdk_step& step) {
    queries.clear();
    batches.clear();
    numbers.assign(step.tokens, -1);
    int64_t longest = 0;
    for (int64_t r = 0; r < step.rows; r++)
        for (int64_t at = std::max(step.starts[r], top_k); at < step.ends[r]; at++) {
            const int64_t token = step.offsets[r] + at - step.starts[r];
            numbers[token] = static_cast<int32_t>(queries.size());
            queries.push_back({token, r, at});
            longest = std::max(longest, at + 1);
        }
    if (queries.empty()) return;
    stride_ = padded(longest);
    const int64_t count = static_cast<int64_t>(queries.size());
    const int64_t most = std::max(TOGETHER, SCORE_BYTES / (stride_ * static_cast<int64_t>(sizeof(float))));
    scores_.resize(std::max<size_t>(scores_.size(), std::min(count, most) * stride_));
    tokens_.resize(std::max<size_t>(tokens_.size(), count * top_k));
    for (int64_t first = 0; first < count; first += most) {
        QueryBatch batch{first, std::min(first + most, count), {}};
        for (int64_t i = first, end; i < batch.last; i = end) {
            const Query& query = queries[i];
            for (end = i + 1; end < batch.last && end < i + TOGETHER && queries[end].row == query.row;) end++;
            const int64_t at = query.position - step.starts[query.row], keys = queries[end - 1].position + 1;
            for (int64_t begin = 0; begin < keys; begin += PIECE_KEYS)
                batch.pieces.push_back(
                    {query.row, at, at + end - i, begin, std::min(begin + PIECE_KEYS, keys), i - first});
        }
        batches.push_back(std::move(batch));
    }
}

// Finds the top_k-th number bits by bits, the highest first, then collects the tokens.
void Selection::choose(int64_t index, float* scores) {
    const int64_t count = queries[index].position + 1;
    uint32_t* numbers = reinterpret_cast<uint32_t*>(scores);
    for (int64_t i = 0; i < count; i++) {
        const uint32_t number = ordered(scores[i]);
        std::memcpy(numbers + i, &number, 4);
    }
    uint32_t found = 0, known = 0;  // the bits of the top_k-th number under `known`
    int64_t left = top_k;           // wanted numbers among those that have these bits
    for (const int shift : {21, 10, 0}) {
        const uint32_t low = shift == 0 ? 0x3ff : 0x7ff;
        int32_t counts[0x800] = {};
        for (int64_t i = 0; i < count; i++)
            if ((numbers[i] & known) == found) counts[numbers[i] >> shift & low]++;
        uint32_t bits = low;
        for (; left > counts[bits]; bits--) left -= counts[bits];
        found |= bits << shift, known |= low << shift;
    }
    int32_t* to = tokens_.data() + index * top_k;
    for (int64_t i = 0; i < count; i++)
        if (numbers[i] > found || (numbers[i] == found && left-- > 0)) *to++ = static_cast<int32_t>(i);
}

}  // namespace pdk
