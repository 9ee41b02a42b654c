// See plan.h.
#include "plan.h"

#include <algorithm>
#include <functional>

namespace pdk {
namespace {

constexpr int64_t SHORTEST = 128;  // minimum keys of a decode piece; shorter pieces cost more than they gain
constexpr int64_t MERGED = 32;     // cost of merging a piece, in keys
constexpr int64_t MOST_CUTS = 4;   // maximum pieces per thread
constexpr int64_t WIDEST = 256;    // maximum key columns of a piece: prefetched data must stay in the cache
constexpr int64_t TOGETHER = 64;   // maximum query heads of a piece with several KV heads
constexpr int64_t QUERY_ROWS = 192;

// How decode rows are cut: KV heads per piece, adjacent and read together, and the maximum keys per piece.
struct Cut {
    int64_t heads, longest;
};

int64_t heads_together(int64_t kv_heads, int64_t group, int64_t dim) {
    int64_t heads = std::max<int64_t>(1, std::min(WIDEST / padded(dim), TOGETHER / group));
    while (kv_heads % heads) heads--;
    return heads;
}

// The keys [begin, end) of a query, cut into pieces of whole segments. The rounding to segments makes a few pieces
// longer than `longest`.
struct Pieces {
    int64_t begin, end, segment, count;
    Pieces(int64_t begin, int64_t end, int64_t longest)
        : begin(begin), end(end), segment(segment_of(end - begin)),
          count(std::min((end - begin + longest - 1) / longest, segments(begin, end))) {}
    // Begin of piece i, which is the end of the previous piece.
    int64_t at(int64_t i) const {
        return i == 0 ? begin : i == count ? end : (begin / segment + segments(begin, end) * i / count) * segment;
    }
    int64_t segments(int64_t from, int64_t to) const { return (to - 1) / segment - from / segment + 1; }
};

// The keys [begin, end) that a query sees.
struct Seen {
    int64_t begin, end;
    int64_t keys() const { return end - begin; }
};

// Estimates the keys after which the last of the threads ends, with queries cut by `longest` and `copies` of each
// piece. Simulates greedy assignment, which round-robin with stealing approximates. `seen` should be sorted by
// descending keys.
int64_t end_of_last(const std::vector<Seen>& seen, int64_t copies, int64_t longest, int threads) {
    std::vector<int64_t> ends(threads);  // a heap with the thread that ends first on top
    for (const Seen& query : seen) {
        const Pieces cut(query.begin, query.end, longest);
        for (int64_t i = 0; i < cut.count * copies; i++) {
            const int64_t piece = i / copies;
            std::pop_heap(ends.begin(), ends.end(), std::greater<>());
            ends.back() += cut.at(piece + 1) - cut.at(piece) + (cut.count > 1 ? MERGED : 0);
            std::push_heap(ends.begin(), ends.end(), std::greater<>());
        }
    }
    return *std::max_element(ends.begin(), ends.end());
}

// Finds the cut with which all threads are done soonest.
Cut best_cut(const std::vector<Seen>& seen, int64_t kv_heads, int64_t together, int threads) {
    const int64_t uncut = INT64_MAX / 4;
    int64_t keys = 0;
    for (const Seen& query : seen) keys += query.keys();
    if (threads == 1 || seen.empty()) return {together, uncut};
    const auto part = [&](int64_t copies, int64_t cuts) {
        return std::max(SHORTEST, (copies * keys - 1) / (cuts * threads) + 1);
    };
    if (static_cast<int64_t>(seen.size()) * kv_heads / together >= 2 * MOST_CUTS * threads)
        return {together, part(kv_heads / together, MOST_CUTS)};
    Cut best{together, uncut};
    int64_t soonest = INT64_MAX;
    for (const int64_t heads : {together, int64_t{1}}) {
        const int64_t copies = kv_heads / heads, each = heads * 10 + (heads < together);  // single heads are 10% slower
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
    return 2 * MOST_TILE_KEYS * wide * 2 + TILE_ROWS * MOST_TILE_KEYS * 6 + rows * (wide * 4 + 8) + 64 * 8;
}

void Plan::make(const pdk_step& step, int64_t kv_heads, int64_t group, int64_t dim, const Sight& sight, int threads) {
    pieces.clear();
    splits.clear();
    partials = 0;
    const int64_t window = sight.window, most = sight.top_k ? sight.top_k : INT64_MAX;
    const auto begin_of = [&](int64_t position) { return window ? std::max<int64_t>(0, position - window + 1) : 0; };
    const auto end_of = [&](int64_t position) { return std::min(position + 1, most); };
    // Adds the pieces of a decode query, which differ from `piece` in their keys.
    const auto add = [&](const Pieces& cut, Piece piece) {
        const int64_t split = cut.count > 1 ? static_cast<int64_t>(splits.size()) : -1;
        int64_t count = 0;
        for (int64_t i = 0; i < cut.count; i++) {
            piece.begin = cut.at(i), piece.end = cut.at(i + 1), piece.apart = i > 0;
            piece.segment = cut.segment;
            pieces.push_back({piece, true, split, count, (piece.end - piece.begin) * piece.heads});
            count += piece.apart ? cut.segments(piece.begin, piece.end) : 1;
        }
        if (split < 0) return;
        splits.push_back({partials, count, cut.count});
        partials += count;
    };
    // The first position of a row that is computed as a decode token.
    const auto prompt_end = [&](int64_t r) { return std::clamp(step.prompts[r], step.starts[r], step.ends[r]); };
    std::vector<Seen> seen;
    for (int64_t r = 0; r < step.rows; r++)
        for (int64_t at = prompt_end(r); at < step.ends[r]; at++) seen.push_back({begin_of(at), end_of(at)});
    std::sort(seen.begin(), seen.end(), [](const Seen& a, const Seen& b) { return a.keys() > b.keys(); });
    const auto [heads, longest] = best_cut(seen, kv_heads, heads_together(kv_heads, group, dim), threads);
    partial_floats = result_floats(heads * group, dim);
    const int64_t queries = extend_queries(group);
    for (int64_t r = 0; r < step.rows; r++) {
        const int64_t start = step.starts[r], behind = prompt_end(r) - start;
        const int64_t whole = std::clamp<int64_t>(most - start, 0, behind);  // prompt tokens that see all before them
        for (int64_t head = 0; head < kv_heads; head++) {
            for (int64_t first = 0; first < whole; first += queries) {
                const int64_t last = std::min(first + queries, whole), begin = begin_of(start + first);
                const int64_t cost = (last - first) * (start + last - begin);
                const Piece piece{r, head, 1, first, last, begin, start + last, nullptr, false, 0};
                pieces.push_back({piece, false, -1, 0, cost});
            }
            for (int64_t first = whole; first < behind; first++)
                pieces.push_back({{r, head, 1, first, first + 1, 0, most, nullptr, false, 0}, false, -1, 0, most});
        }
        for (int64_t first = behind; first < step.ends[r] - start; first++) {
            const Pieces cut(begin_of(start + first), end_of(start + first), longest);
            for (int64_t head = 0; head < kv_heads; head += heads)
                add(cut, {r, head, heads, first, first + 1, 0, 0, nullptr, false, 0});
        }
    }
    std::stable_sort(pieces.begin(), pieces.end(), [](const auto& a, const auto& b) { return a.cost > b.cost; });
    done = std::vector<std::atomic<int32_t>>(splits.size());
}

}  // namespace pdk
