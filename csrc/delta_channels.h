// Kimi Delta Attention (arXiv:2510.26692): prompts, where each row of a state has a decay. See delta_rule.h for all else.
//
// Each channel of a key has its own g; G is the running sum of a channel's g. Token i reads the key of token j as the
// sum over channels of k_i k_j e^(G_i - G_j). e^(-G_j) alone may overflow, so a chunk has parts of PART tokens. A part
// meets earlier keys by way of its first token r: the factors of e^(G_i - G_r) e^(G_r - G_j) are at most 1, and their
// products with keys are rounded to bf16. Within a part, k_j is multiplied by e^g token by token, in float32.
#pragma once

constexpr int64_t PART = 16, CHANNEL_VECTORS = 8;
static_assert(CHUNK % PART == 0);

// Convolved queries or keys of a chunk, of length 1 times `scale`: rows of `kd` floats; 0 elsewhere.
static void unit_floats(const Delta& d, const Channels& of, int64_t first, int64_t count, bool fresh, float scale,
                        const DeltaRoom& r, float* out) {
    const int64_t kd = padded(of.dim);
    convolve(d, of, first, count, fresh, r.past, r.x, of.dim);
    memset(out, 0, sizeof(float) * CHUNK * kd);
    for (int64_t t = 0; t < count; t++) {
        const F factor = set1(unit_scale(r.x + t * of.dim, of.dim) * scale);
        for (int64_t c = 0; c < of.dim; c += 16) store(out + t * kd + c, load(r.x + t * of.dim + c) * factor);
    }
}

// out = x e^(to - from), a row of bf16.
INLINE void decay_row(const float* x, const float* to, const float* from, int64_t kd, bf16* out) {
    for (int64_t c = 0; c < kd; c += 16) store_half(out + c, load(x + c) * exp(load(to + c) - load(from + c)));
}

// Adds the products within a part of `n` tokens from token `first` on, of 16 * N channels from `c` on.
template <int N>
INLINE void add_part(const DeltaRoom& r, int64_t kd, int64_t first, int64_t n, int64_t c) {
    for (int64_t j = first; j < first + n; j++) {
        F key[N];
#pragma GCC unroll 8
        for (int v = 0; v < N; v++) key[v] = load(r.unit_keys + j * kd + c + 16 * v);
        for (int64_t i = j; i < first + n; i++) {
            const int64_t row = i * kd + c;
            F of_query = zero(), of_key = zero();
#pragma GCC unroll 8
            for (int v = 0; v < N; v++) {
                if (i > j) key[v] = key[v] * load(r.steps + row + 16 * v);
                of_query = fma(load(r.unit_queries + row + 16 * v), key[v], of_query);
                of_key = fma(load(r.unit_keys + row + 16 * v), key[v], of_key);
            }
            r.query_scores[i * CHUNK + j] += sum(of_query);
            r.key_scores[i * CHUNK + j] += sum(of_key);
        }
    }
}

// The products of queries and keys with the keys at or before them.
static void score_chunk(const Delta& d, int64_t count, const QueryMultiplier& multiplier, const DeltaRoom& r) {
    const int64_t kd = padded(d.key_dim);
    for (int64_t s = 0; s < count; s += PART) {
        const int64_t n = count - s < PART ? count - s : PART, columns = padded(s);
        const float* entry = r.running + s * kd;
        if (s) {
            bf16 *of_queries = r.queries, *of_keys = r.queries + PART * kd;
            for (int64_t j = 0; j < columns; j++) {
                if (j < s) decay_row(r.unit_keys + j * kd, entry, r.running + j * kd, kd, r.keys + j * kd);
                else memset(r.keys + j * kd, 0, sizeof(bf16) * kd);
            }
            for (int64_t i = 0; i < n; i++) {
                const int64_t row = (s + i) * kd;
                decay_row(r.unit_queries + row, r.running + row, entry, kd, of_queries + i * kd);
                decay_row(r.unit_keys + row, r.running + row, entry, kd, of_keys + i * kd);
            }
            pack_keys(r.keys, columns, kd, r.packed_keys);
            float *to_queries = r.query_scores + s * CHUNK, *to_keys = r.key_scores + s * CHUNK;
            multiply<false, false, false>(multiplier, r.packed_keys, kd, columns, of_queries, n, to_queries, CHUNK, r.ones);
            multiply<false, false, false>(multiplier, r.packed_keys, kd, columns, of_keys, n, to_keys, CHUNK, r.ones);
        }
        for (int64_t i = s; i < s + n; i++) {
            store(r.query_scores + i * CHUNK + s, zero());
            store(r.key_scores + i * CHUNK + s, zero());
        }
        int64_t c = 0;
        for (; c + 16 * CHANNEL_VECTORS <= d.key_dim; c += 16 * CHANNEL_VECTORS) add_part<CHANNEL_VECTORS>(r, kd, s, n, c);
        for (; c < d.key_dim; c += 16) add_part<1>(r, kd, s, n, c);
    }
}

// The decays of a chunk's tokens: e^g in r.steps, and the running sums of g.
static void decay_chunk(const Delta& d, int64_t head, int64_t first, int64_t count, const DeltaRoom& r) {
    const int64_t dim = d.key_dim, kd = padded(dim);
    memset(r.running, 0, sizeof(float) * CHUNK * kd);
    for (int64_t t = 0; t < count; t++) {
        float *g = r.steps + t * kd, *sums = r.running + t * kd;
        decays_of(d, first + t, head, g);
        for (int64_t c = 0; c < dim; c += 16) {
            const F now = load(g + c);
            store(sums + c, t ? load(sums - kd + c) + now : now);
            store(g + c, exp(now));
        }
    }
}

// Tokens [first, first + count) of a prompt, which lie in one chunk; as extend_delta.
static void extend_channels(const Delta& d, const DeltaState& state, int64_t head, int64_t first, int64_t count,
                            bool fresh, const QueryMultiplier& multiplier, const DeltaRoom& r) {
    const int64_t dim = d.key_dim, wide = d.value_dim, kd = padded(dim), vd = padded(wide);
    const int64_t share = d.value_heads / d.key_heads;
    unit_floats(d, queries_of(d, state, head), first, count, fresh, 1.0f / sqrtf((float)dim), r, r.unit_queries);
    unit_floats(d, keys_of(d, state, head), first, count, fresh, 1.0f, r, r.unit_keys);
    float* none = r.past;  // zeros: e^(G - 0) is the decay since the chunk's begin
    for (int64_t h = head * share; h < (head + 1) * share; h++) {
        float *s = state.state + h * dim * wide, *x = r.x;
        memset(r.state, 0, sizeof(float) * kd * vd);
        if (!fresh)
            for (int64_t i = 0; i < dim; i++) memcpy(r.state + i * vd, s + i * wide, sizeof(float) * wide);
        pack_rows(r.state, kd, vd, r.ones, r.packed_state);
        decay_chunk(d, h, first, count, r);
        memset(none, 0, sizeof(float) * kd);
        for (int64_t t = 0; t < count; t++) {
            decay_row(r.unit_queries + t * kd, r.running + t * kd, none, kd, r.queries + t * kd);
            decay_row(r.unit_keys + t * kd, r.running + t * kd, none, kd, r.keys + t * kd);
        }
        multiply<false, false, false>(multiplier, r.packed_state, kd, vd, r.keys, count, r.of_keys, vd, r.ones);
        multiply<false, false, false>(multiplier, r.packed_state, kd, vd, r.queries, count, r.out, vd, r.ones);
        score_chunk(d, count, multiplier, r);
        memset(x, 0, sizeof(float) * CHUNK * vd);
        convolve(d, values_of(d, state, h), first, count, fresh, r.past, x, vd);
        memset(r.weights, 0, sizeof(bf16) * CHUNK * CHUNK);
        for (int64_t t = 0; t < count; t++) {
            const F beta = set1(beta_of(d, first + t, h));
            for (int64_t c = t * vd; c < (t + 1) * vd; c += 16) store(x + c, (load(x + c) - load(r.of_keys + c)) * beta);
            for (int64_t j = 0; j <= t; j += 16) {
                const int64_t at = t * CHUNK + j;
                store_half(r.weights + at, within(load(r.query_scores + at), zero(), 0, t + 1 - j));
                store(r.rule + at, load(r.key_scores + at) * beta);
            }
        }
        solve_rule(r.rule, count, x, vd);
        pack_rows(x, CHUNK, vd, r.ones, r.packed);
        multiply<true, false, true>(multiplier, r.packed, CHUNK, vd, r.weights, count, r.out, vd, r.ones);
        const float* end = r.running + (count - 1) * kd;
        memset(r.keys, 0, sizeof(bf16) * CHUNK * kd);
        for (int64_t t = 0; t < count; t++) decay_row(r.unit_keys + t * kd, end, r.running + t * kd, kd, r.keys + t * kd);
        pack_keys(r.keys, CHUNK, kd, r.packed_keys);
        turn_keys(r.packed_keys, kd, r.turned_keys);
        float* keep = r.of_keys;  // no longer needed
        for (int64_t c = 0; c < kd; c += 16) store(keep + c, exp(load(end + c)));
        multiply<true, false, false>(multiplier, r.packed, CHUNK, vd, r.turned_keys, kd, r.state, vd, keep);
        for (int64_t i = 0; i < dim; i++) memcpy(s + i * wide, r.state + i * vd, sizeof(float) * wide);
        for (int64_t t = 0; t < count; t++) gate_output(d, first + t, h, r.out + t * vd);
    }
}
