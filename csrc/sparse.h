// The operations of sparse attention (DSA): index keys, and the selection of tokens. Made by api.cpp.
#pragma once
#include "ops.h"

namespace pdk {

struct PlaceIndex : Op {
    int64_t group, queries, keys, layer;
    const float *norm, *bias;
    float eps;
    bool beside;
    PlaceIndex(int64_t group, int64_t queries, int64_t keys, int64_t layer, const float* norm, const float* bias,
               float eps, bool beside)
        : group(group), queries(queries), keys(keys), layer(layer), norm(norm), bias(bias), eps(eps), beside(beside) {}
    void run(Program& p, int thread) override;
};

struct SelectTokens : Op {
    int64_t group, layer, weights;
    float scale;
    Selection* selection;
    SelectTokens(int64_t group, int64_t layer, int64_t weights, float scale, Selection* selection)
        : group(group), layer(layer), weights(weights), scale(scale), selection(selection) {}
    void run(Program& p, int thread) override;
};

// A piece of a query over copies of the tokens that it has selected, which lie one after the other in the thread's
// scratch. Latents only: the values are the keys.
class Gathered {
  public:
    // `tokens`: the selected ones of the query, [top_k].
    Gathered(Program& p, const Attention& a, const Piece& piece, const int32_t* tokens, int thread);
    Gathered(const Gathered&) = delete;
    static int64_t scratch_bytes(const pdk_heads& heads, int64_t top_k);

    Attention attention;
    Piece piece;

  private:
    const int64_t start_, end_, offset_;
    const int32_t page_ = 0;
};

}  // namespace pdk
