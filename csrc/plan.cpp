// See plan.h.
#include "plan.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace pdk {
namespace {

constexpr int64_t SHORTEST = 128;  // keys of a piece of decode, below which cutting costs more than it gains
constexpr int64_t MERGED = 32;     // keys that could be computed while a piece that was cut off is merged
constexpr int64_t MOST_CUTS = 4;   // pieces for each thread that are enough
constexpr int64_t WIDEST = 256;    // columns of keys that a piece has: what is asked for must stay in the cache
constexpr int64_t QUERY_ROWS = 192;

// How rows that decode are cut: KV heads of a piece, which lie side by side and are read together, and its longest.
struct Cut {
    int64_t heads, longest;
};

int64_t heads_together(int64_t kv_heads, int64_t group, int64_t dim) {
    int64_t heads = std::max<int64_t>(1, std::min(WIDEST / padded(dim), MAX_GROUP / group));
    while (kv_heads % heads) heads--;
    return heads;
}

int64_t cuts_of(int64_t keys, int64_t longest) { return (keys + longest - 1) / longest; }

// After how many keys the last of so many threads ends, where no piece is longer than `longest`; `seen` are the keys of
// each query, which has `copies` of each piece. As if pieces were taken as they come, which dealing
// them out and taking from others come near to; so `seen` should descend.
int64_t end_of_last(const std::vector<int64_t>& seen, int64_t copies, int64_t longest, int threads) {
    std::vector<int64_t> ends(threads);  // a heap, the thread that ends first on top
    for (const int64_t keys : seen) {
        const int64_t count = cuts_of(keys, longest), cost = keys / count + (count > 1 ? MERGED : 0);
        for (int64_t i = 0; i < count * copies; i++) {
            std::pop_heap(ends.begin(), ends.end(), std::greater<>());
            ends.back() += cost;
            std::push_heap(ends.begin(), ends.end(), std::greater<>());
        }
    }
    return *std::max_element(ends.begin(), ends.end());
}

// The cut with which all threads are done soonest.
Cut best_cut(const std::vector<int64_t>& seen, int64_t kv_heads, int64_t together, int threads) {
    const int64_t uncut = INT64_MAX / 4, keys = std::accumulate(seen.begin(), seen.end(), int64_t{0});
    if (threads == 1 || seen.empty()) return {together, uncut};
    const auto part = [&](int64_t copies, int64_t cuts) {
        return std::max(SHORTEST, (copies * keys - 1) / (cuts * threads) + 1);
    };
    if (static_cast<int64_t>(seen.size()) * kv_heads / together >= 2 * MOST_CUTS * threads)
        return {together, part(kv_heads / together, MOST_CUTS)};
    Cut best{together, uncut};
    int64_t soonest = INT64_MAX;
    for (const int64_t heads : {together, int64_t{1}}) {
        const int64_t copies = kv_heads / heads, each = heads * 10 + (heads < together);  // one by one is a tenth slower
        for (int64_t cuts = 0; cuts <= MOST_CUTS; cuts++) {
            const int64_t longest = cuts ? part(copies, cuts) : uncut;
            const int64_t end = end_of_last(seen, copies, longest, threads) * each;
            if (end < soonest) soonest = end, best = {heads, longest};
        }
    }
    return best;
}

}  // namespace

int64_t extend_queries(int64_t group) { return std::max<int64_t>(1, QUERY_ROWS / group); }

int64_t extend_scratch_bytes(int64_t group, int64_t dim) {
    const int64_t rows = extend_queries(group) * group, wide = padded(dim);
    return 2 * TILE_KEYS * wide * 2 + rows * (TILE_KEYS * 6 + wide * 4 + 8) + 64 * 8;
}

void Plan::make(const pdk_step& step, int64_t kv_heads, int64_t group, int64_t dim, int64_t window, int threads) {
    pieces.clear();
    splits.clear();
    partials = 0;
    const auto begin_of = [&](int64_t position) { return window ? std::max<int64_t>(0, position - window + 1) : 0; };
    std::vector<int64_t> seen;
    for (int64_t r = 0; r < step.rows; r++)
        if (step.ends[r] - step.starts[r] == 1) seen.push_back(step.ends[r] - begin_of(step.starts[r]));
    std::sort(seen.begin(), seen.end(), std::greater<>());
    const auto [heads, longest] = best_cut(seen, kv_heads, heads_together(kv_heads, group, dim), threads);
    partial_floats = heads * group * (PARTIAL_HEAD + padded(dim));
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
        const int64_t begin = begin_of(start), keys = end - begin, count = cuts_of(keys, longest);
        for (int64_t head = 0; head < kv_heads; head += heads) {
            if (count == 1) {
                pieces.push_back({{r, head, heads, 0, 1, begin, end, nullptr}, -1, 0, keys * heads});
                continue;
            }
            const auto cut = [&](int64_t i) {
                const int64_t at = begin + keys * i / count;
                return i % count ? at / RUN * RUN : at;
            };
            for (int64_t i = 0; i < count; i++) {
                const int64_t from = cut(i), to = cut(i + 1);
                pieces.push_back({{r, head, heads, 0, 1, from, to, nullptr},
                                  static_cast<int64_t>(splits.size()), i, (to - from) * heads});
            }
            splits.push_back({partials, count});
            partials += count;
        }
    }
    std::stable_sort(pieces.begin(), pieces.end(), [](const auto& a, const auto& b) { return a.cost > b.cost; });
    done = std::vector<std::atomic<int32_t>>(splits.size());
}

}  // namespace pdk
