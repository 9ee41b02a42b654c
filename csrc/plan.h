// Cuts the attention of one step into pieces, which are assigned to threads. Shared by all layers.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "kernels.h"
#include "pdk.h"

namespace pdk {

// What a query sees of the tokens up to itself: the last `window` of them, or `top_k` that its layer selects. 0 disables
// each. A piece of a query with selected tokens has [0, top_k) as its keys, which count these.
struct Sight {
    int64_t window, top_k;
};

// A piece of decode or extend. `split`: the split query whose partial results it leaves from `partial` on; -1: none.
struct Planned {
    Piece piece;
    bool decodes;
    int64_t split, partial, cost;
};

// A query whose keys are divided among `pieces`. The thread that ends the last piece merges their partial results.
struct Split {
    int64_t first_partial, partials, pieces;
};

struct Plan {
    std::vector<Planned> pieces;  // most costly first
    std::vector<Split> splits;
    std::vector<std::atomic<int32_t>> done;  // ended pieces of each split since the plan was made
    int64_t partials = 0;
    int64_t partial_floats = 0;  // floats of one partial result

    void make(const pdk_step& step, int64_t kv_heads, int64_t group, int64_t dim, const Sight& sight, int threads);
};

}  // namespace pdk
