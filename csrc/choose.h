// Choosing tokens from logits: greedily, or one draw within top-k, top-p and min-p. Called by api.cpp.
#pragma once
#include "kernels.h"
#include "pdk.h"

namespace pdk {

// Floats of scratch that `choose` needs for `count` logits.
inline int64_t choose_floats(int64_t count) { return 2 * count + CHOICE_BLOCK; }

// One row's token. As pdserve/executor/sampler.py says; see there for what the filters mean.
int64_t choose(const Kernels& kernels, const float* logits, int64_t count, const pdk_choice& how, float* scratch);

}  // namespace pdk
