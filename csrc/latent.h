// The operations of multi-head latent attention (MLA) around attention itself. Made by api.cpp.
#pragma once
#include "ops.h"

namespace pdk {

// Multiplies the columns of each head with weights of its own, which lie one after the other. The first head's columns
// begin at `first`; `sharing` heads after each other have the same columns.
struct HeadProduct : Op {
    int64_t in, first, stride, sharing, columns, heads;
    Weights weights;
    int64_t out;
    HeadProduct(int64_t in, int64_t first, int64_t stride, int64_t sharing, int64_t columns, int64_t heads,
                const Weights& weights, int64_t out)
        : in(in), first(first), stride(stride), sharing(sharing), columns(columns), heads(heads), weights(weights),
          out(out) {}
    void run(Program& p, int thread) override;
    Soon first_read(Program& p, int thread) const override;

  private:
    Weights of_head(int64_t head) const;
    static int64_t pieces(const Program& p) { return (p.step.tokens + OWN_ROWS - 1) / OWN_ROWS; }  // of each head
};

struct PlaceLatents : Op {
    int64_t group, absorbed, queries, down, layer;
    const float* norm;
    float eps;
    Pairs pairs;
    PlaceLatents(int64_t group, int64_t absorbed, int64_t queries, int64_t down, int64_t layer, const float* norm,
                 float eps, Pairs pairs)
        : group(group), absorbed(absorbed), queries(queries), down(down), layer(layer), norm(norm), eps(eps),
          pairs(pairs) {}
    void run(Program& p, int thread) override;
};

}  // namespace pdk
