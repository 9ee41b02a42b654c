// See delta.h.
#include "delta.h"

#include <algorithm>
#include <numeric>

namespace pdk {

static_assert(DELTA_PENDING == PDK_PENDING && 2 * DELTA_PENDING <= DELTA_CHUNK, "scratch of chunks holds pending tokens");

int64_t delta_scratch_bytes(int64_t key_dim, int64_t value_dim, int64_t taps, bool by_channel) {
    const int64_t kd = padded(key_dim), vd = padded(value_dim), most = std::max(kd, vd), c = DELTA_CHUNK;
    const int64_t floats = (taps + c) * most + c * most + kd * vd + 2 * c * vd + 3 * c * c + 4 * c + std::max(most, c);
    const int64_t halves = 4 * c * kd + kd * vd + c * c + 2 * c * vd;
    return 4 * (floats + (by_channel ? 4 * c * kd : 0)) + 2 * halves + 25 * 64;
}

void DeltaNet::prepare_for(Program& p) {
    const pdk_step& step = p.step;
    turns_.reset(p.pool.size());
    rows_.resize(step.rows);
    std::iota(rows_.begin(), rows_.end(), 0);
    const auto tokens = [&](int64_t row) { return step.ends[row] - step.starts[row]; };
    if (step.tokens > step.rows)
        std::stable_sort(rows_.begin(), rows_.end(), [&](int64_t a, int64_t b) { return tokens(a) > tokens(b); });
}

DeltaState DeltaNet::state_of(const Program& p, int64_t row) const {
    const int64_t slot = p.step.slots[row], values = states.value_heads * states.value_dim;
    const int64_t keys = states.key_heads * states.key_dim, first = slot * states.pending;
    const auto at = [&](void* plane) { return static_cast<char*>(plane) + slot * states.slot_stride; };
    return {reinterpret_cast<bf16*>(at(states.conv_q)), reinterpret_cast<bf16*>(at(states.conv_k)),
            reinterpret_cast<bf16*>(at(states.conv_v)), reinterpret_cast<float*>(at(states.state)),
            static_cast<bf16*>(states.inputs) + first * (2 * keys + values),
            static_cast<float*>(states.keys) + first * keys, static_cast<float*>(states.deltas) + first * values,
            static_cast<float*>(states.decays) + first * states.value_heads * (gates < 0 ? 1 : states.key_dim)};
}

// Memory of a piece's first state.
Soon DeltaNet::state_read(const Program& p, int64_t piece) const {
    if (piece >= p.step.rows * states.key_heads) return {};
    const int64_t head = piece % states.key_heads * (states.value_heads / states.key_heads);
    const float* state = state_of(p, rows_[piece / states.key_heads]).state;
    return {reinterpret_cast<const uint8_t*>(state + head * states.key_dim * states.value_dim)};
}

Soon DeltaNet::first_read(Program& p, int thread) const {
    const Soon first = state_read(p, thread);
    return first.at ? first : soon(p, thread);
}

void DeltaNet::run(Program& p, int thread) {
    const pdk_step& step = p.step;
    const Delta d{states.key_heads, states.value_heads, states.key_dim, states.value_dim, states.taps,
                  p.floats(in), p.buffers[in].width, gates < 0 ? nullptr : p.floats(gates),
                  gates < 0 ? 0 : p.buffers[gates].width, conv, decay, bias, norm, eps, p.floats(out)};
    const int64_t pieces = step.rows * states.key_heads;
    for (int64_t i; turns_.take(thread, pieces, i);) {
        const int64_t row = rows_[i / states.key_heads], start = step.starts[row], tokens = step.ends[row] - start;
        const int64_t prompts = std::clamp<int64_t>(step.prompts[row] - start, 0, tokens);
        const DeltaPiece piece{i % states.key_heads, step.offsets[row], start, tokens, prompts,
                               step.folded ? step.folded[row] : 0, step.drafts && step.drafts[row] > 0};
        p.kernels.delta(d, state_of(p, row), piece, state_read(p, i + p.pool.size()), p.scratch[thread]->as<uint8_t>());
    }
}

}  // namespace pdk
