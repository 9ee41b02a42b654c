// Sampling of tokens from logits: greedy, or one draw with top-k, top-p and min-p. Called by api.cpp.
#pragma once
#include "kernels.h"
#include "pdk.h"

namespace pdk {

// Scratch floats that `choose` needs for `count` logits.
inline int64_t choose_floats(int64_t count) { return 2 * count + CHOICE_BLOCK; }

// Samples one row's token. pdserve/executor/sampler.py defines the filters.
int64_t choose(const Kernels& kernels, const float* logits, int64_t count, const pdk_choice& how, float* scratch);

}  // namespace pdk
