// See plan.h.
#include "plan.h"

#include <algorithm>

namespace pdk {
namespace {

constexpr int64_t SHORTEST = 256;  // keys of a piece of decode, below which cutting costs more than it gains
constexpr int64_t QUERY_ROWS = 192;
constexpr int64_t KEYS_AT_ONCE = 128;
constexpr int64_t PARTIAL_HEAD = 16;

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
    int64_t keys = 0;
    for (int64_t r = 0; r < step.rows; r++) keys += step.ends[r];
    const int64_t fair = (keys * kv_heads / (4 * threads) + KEYS_AT_ONCE - 1) / KEYS_AT_ONCE * KEYS_AT_ONCE;
    const int64_t longest = threads == 1 ? INT64_MAX / 4 : std::max(SHORTEST, fair);
    const int64_t queries = extend_queries(group);
    for (int64_t r = 0; r < step.rows; r++) {
        const int64_t start = step.starts[r], end = step.ends[r];
        for (int64_t head = 0; head < kv_heads; head++) {
            if (end - start > 1) {
                for (int64_t first = 0; first < end - start; first += queries) {
                    const int64_t last = std::min(first + queries, end - start);
                    const int64_t begin = window ? std::max<int64_t>(0, start + first - window + 1) : 0;
                    const int64_t cost = (last - first) * (start + last - begin);
                    pieces.push_back({{r, head, first, last, begin, start + last, nullptr}, -1, 0, cost});
                }
                continue;
            }
            const int64_t begin = window ? std::max<int64_t>(0, end - window) : 0;
            const int64_t count = (end - begin + longest - 1) / longest;
            if (count == 1) {
                pieces.push_back({{r, head, 0, 1, begin, end, nullptr}, -1, 0, end - begin});
                continue;
            }
            for (int64_t i = 0; i < count; i++) {
                const int64_t from = begin + (end - begin) * i / count, to = begin + (end - begin) * (i + 1) / count;
                pieces.push_back({{r, head, 0, 1, from, to, nullptr}, static_cast<int64_t>(splits.size()), i, to - from});
            }
            splits.push_back({partials, count});
            partials += count;
        }
    }
    std::stable_sort(pieces.begin(), pieces.end(), [](const auto& a, const auto& b) { return a.cost > b.cost; });
    done = std::vector<std::atomic<int32_t>>(splits.size());
}

}  // namespace pdk
