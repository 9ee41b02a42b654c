// Mixture-of-experts operations of a program: routing, and the experts' feed-forward layers. Made by api.cpp.
#pragma once
#include "ops.h"

namespace pdk {

// Finds the likeliest experts of each token, best first, and their probabilities.
struct Route : Op {
    int64_t logits, top_k;
    bool normalise;
    int64_t experts, weights;
    Route(int64_t logits, int64_t top_k, bool normalise, int64_t experts, int64_t weights)
        : logits(logits), top_k(top_k), normalise(normalise), experts(experts), weights(weights) {}
    void run(Program& p, int thread) override;
};

// The weights of `count` experts, one after the other; `gate_up` has the layout of a gated product. `counts`: see
// pdk.h.
struct Mixture {
    int64_t count;
    Weights gate_up, down;
    int64_t* counts;
};

// Blocks [begin, end) of an expert's weights, or pairs of blocks, for all `rows` of its inputs, which begin at `row`.
struct Part {
    int64_t expert, row, rows, begin, end;
};

// Sorts routes by expert; each expert then multiplies all its rows at once.
struct Experts : Op {
    Source source;
    int64_t experts, weights;
    Mixture mixture;
    int64_t out;
    bool add;
    Experts(const Source& source, int64_t experts, int64_t weights, const Mixture& mixture, int64_t out, bool add)
        : source(source), experts(experts), weights(weights), mixture(mixture), out(out), add(add) {}
    void run(Program& p, int thread) override;
    void prepare_for(Program& p) override;
    bool prepares() const override { return true; }
    Soon first_read(Program&, int) const override { return {}; }  // unknown before routing

  private:
    int64_t tokens(const Program& p) const { return p.count(p.buffers[out].of_samples); }
    int64_t routes(const Program& p) const { return tokens(p) * p.buffers[experts].width; }
    void sort(Program& p) const;
    template <class Call>
    void share_blocks(const Program& p, int thread, int64_t blocks, Call&& call) const;
};

}  // namespace pdk
