// The GatedDeltaNet operation of a program. Made by api.cpp; delta_rule.h and delta_pending.h have the kernel.
#pragma once
#include "ops.h"

namespace pdk {

// A piece of work is one key head of a row, with its value heads. Rows with the most tokens come first.
struct DeltaNet : Op {
    const pdk_states states;
    int64_t in, gates;  // gates: -1 with a decay for each state
    const float *conv, *decay, *bias, *norm;
    float eps;
    int64_t out;
    DeltaNet(const pdk_states& states, int64_t in, int64_t gates, const float* conv, const float* decay,
             const float* bias, const float* norm, float eps, int64_t out)
        : states(states), in(in), gates(gates), conv(conv), decay(decay), bias(bias), norm(norm), eps(eps), out(out) {}
    void run(Program& p, int thread) override;
    void prepare_for(Program& p) override;
    bool prepares() const override { return true; }
    Soon first_read(Program& p, int thread) const override;

  private:
    DeltaState state_of(const Program& p, int64_t row) const;
    Soon state_read(const Program& p, int64_t piece) const;
    Turns turns_;
    std::vector<int64_t> rows_;  // most tokens first
};

}  // namespace pdk
