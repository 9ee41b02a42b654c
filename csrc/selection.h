// Sparse attention (DSA): which tokens of its row each token of a step attends to. Shared by layers with the same top_k.
#pragma once
#include <cstdint>
#include <vector>

#include "pdk.h"

namespace pdk {

// A token of a step that sees more than top_k tokens, and so attends to those with the highest scores.
struct Query {
    int64_t token, row, position;
};

// A piece of the index scores: queries [first, last) among the row's new tokens, keys [begin, end). The scores of its
// first query are line `line` of the batch.
struct Scored {
    int64_t row, first, last, begin, end, line;
};

// Queries whose scores are in memory at once, [first, last), and the pieces of their scores.
struct QueryBatch {
    int64_t first, last;
    std::vector<Scored> pieces;
};

class Selection {
  public:
    explicit Selection(int64_t top_k) : top_k(top_k) {}
    // Lists the queries of a step.
    void make(const pdk_step& step);
    // Writes the tokens of query `index` with the highest of its `scores` [position + 1], in ascending order. Of equal
    // scores the earlier tokens come first; NaN is lower than all numbers. Overwrites the scores.
    void choose(int64_t index, float* scores);
    float* scores_of(int64_t line) { return scores_.data() + line * stride_; }
    int64_t stride() const { return stride_; }
    // [top_k], those of the last layer that has chosen.
    const int32_t* tokens_of(int64_t index) const { return tokens_.data() + index * top_k; }

    const int64_t top_k;
    std::vector<Query> queries;
    std::vector<int32_t> numbers;  // [tokens]: of each token among the queries, -1 for a token that sees all
    std::vector<QueryBatch> batches;

  private:
    int64_t stride_ = 0;  // floats of a line of scores
    std::vector<float> scores_;    // these only grow
    std::vector<int32_t> tokens_;  // [queries][top_k]
};

}  // namespace pdk
