// Mixture-of-experts operations of a program: routing, and the experts' feed-forward layers. Made by api.cpp.
#pragma once
#include "ops.h"

namespace pdk {

// How experts are chosen: see pdk_routing. `correction` may be null.
struct Routing {
    int64_t top_k;
    bool normalise, sigmoid;
    int64_t groups, top_groups;
    float scale;
    const float* correction;
    // Whether the order of the logits is that of the choice.
    bool plain() const { return !correction && groups == 1; }
};

// Finds the best experts of each token, best first, and their weights.
struct Route : Op {
    int64_t logits;
    Routing how;
    int64_t experts, weights;
    Route(int64_t logits, const Routing& how, int64_t experts, int64_t weights)
        : logits(logits), how(how), experts(experts), weights(weights) {}
    void run(Program& p, int thread) override;
    // Scratch floats of a thread.
    static int64_t scratch_floats(const Routing& how, int64_t count) { return how.plain() ? 0 : 2 * count + how.groups; }

  private:
    // Writes the scores of a token's `count` experts to `scores`, and to `choice` what decides among them.
    void score(const float* x, int64_t count, float* scores, float* choice, float* of_groups) const;
};

// The weights of `count` experts, one after the other; `gate_up` has the layout of a gated product, with `activation`.
// `counts`: see pdk.h.
struct Mixture {
    int64_t count;
    Weights gate_up, down;
    Activation activation;
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
