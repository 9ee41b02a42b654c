// How the attention of one step is cut into pieces, which are dealt out to threads. The same for all layers.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "kernels.h"
#include "pdk.h"

namespace pdk {

// A piece of decode or extend; and the split query whose partial results it leaves, from `partial` on (split -1: none).
struct Planned {
    Piece piece;
    bool decodes;
    int64_t split, partial, cost;
};

// A query whose keys are shared by `pieces`; whoever ends the last of them merges their partial results.
struct Split {
    int64_t first_partial, partials, pieces;
};

struct Plan {
    std::vector<Planned> pieces;  // most costly first
    std::vector<Split> splits;
    std::vector<std::atomic<int32_t>> done;  // pieces of each split that were ended since the plan was made
    int64_t partials = 0;
    int64_t partial_floats = 0;  // of one

    // `window` 0: everything is seen.
    void make(const pdk_step& step, int64_t kv_heads, int64_t group, int64_t dim, int64_t window, int threads);
};

}  // namespace pdk
