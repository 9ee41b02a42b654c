// GatedDeltaNet: rows with drafts, and the pieces of work. See delta_rule.h for the rule; pdk.h says what pends.
//
// A row with drafts is computed token by token on a copy of some columns of a state, which stays in the cache. It leaves
// k, d, e^g and the input of each token. The next pass over the state first folds the accepted ones into it, by the same
// operations as a decoded token, so to the same bits.
#pragma once

// As `convolve`, for the tokens of a piece behind the pending tokens of `inputs` that are folded. Leaves the new inputs
// there if they pend.
static void convolve_pending(const Delta& d, const Channels& of, const DeltaPiece& p, bf16* inputs, float* past,
                             float* out) {
    const int64_t dim = of.dim, before = d.taps - 1, channels = channels_of(d);
    recall(of.kept, dim, before, past);
    for (int64_t t = 0; t < p.folded; t++)
        for (int64_t c = 0; c < dim; c += 16)
            store(past + (before + t) * dim + c, load_half(inputs + t * channels + of.column + c));
    past += p.folded * dim;
    round_inputs(d, of, p.offset, p.tokens, past + before * dim);
    filter(d, of, p.tokens, past, out, dim);
    const int64_t kept = p.pends ? 0 : p.tokens;
    if (p.folded + kept) retain(past + kept * dim, dim, before, of.kept);
    for (int64_t t = 0; p.pends && t < p.tokens; t++)
        for (int64_t c = 0; c < dim; c += 16)
            store_half(inputs + t * channels + of.column + c, load(past + (before + t) * dim + c));
}

// Tokens that change a state: k and d of token t are `key_stride` and `delta_stride` after those of the one before.
struct Changes {
    int64_t count, key_stride, delta_stride;
    const float* keys;
    float* deltas;
    float grown[DELTA_PENDING];  // e^g
};

// Passes over 16 * N columns of a state: folds `past` into it, and applies the tokens `now` in place, or with `copy` to
// a copy there. `q` and the keys of `now` are rows of `rows` floats. v, rows of `stride` floats, become the outputs.
// The deltas of `now` are stored, if not null, as far apart as those of `past`.
template <int N>
INLINE void pending_columns(float* state, int64_t stride, int64_t rows, const Changes& past, const Changes& now,
                            const float* q, const float* betas, float* copy, const float* next, float* v) {
    const int64_t folds = past.count, tokens = now.count, wide = copy ? 16 * N : stride;
    const int64_t key_stride = past.key_stride, delta_stride = past.delta_stride;
    const float *past_keys = past.keys, *past_deltas = past.deltas, *past_grown = past.grown, *keys = now.keys;
    float *deltas = now.deltas, *to = copy ? copy : state;
    F s[N], o[N], x[N], change[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) s[n] = zero();
    for (int64_t i = 0; i < rows; i++) {
        float* at = state + i * stride;
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            asm volatile("" ::: "memory");
            __builtin_prefetch(next + i * stride + 16 * n, 1, NEAREST);
            x[n] = load(at + 16 * n);
        }
        for (int64_t t = 0; t < folds; t++) {
            const F key = set1(past_keys[t * key_stride + i]), keep = set1(past_grown[t]);
            const float* delta = past_deltas + t * delta_stride;
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) x[n] = fma(key, load(delta + 16 * n), x[n] * keep);
        }
        const F key = set1(tokens ? keys[i] : 0.0f);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            if (folds) store(at + 16 * n, x[n]);
            if (copy) store(to + i * wide + 16 * n, x[n]);
            s[n] = fma(key, x[n], s[n]);
        }
    }
    for (int64_t t = 0; t < tokens; t++) {
        const F keep = set1(now.grown[t]), weight = set1(betas[t]);
        const float *k = keys + t * rows, *query = q + t * rows, *then = t + 1 < tokens ? k + rows : k;
        float* out = v + t * stride;
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            change[n] = (load(out + 16 * n) - s[n] * keep) * weight;
            if (deltas) store(deltas + t * delta_stride + 16 * n, change[n]);
            s[n] = o[n] = zero();
        }
        for (int64_t i = 0; i < rows; i++) {
            const F key = set1(k[i]), of_q = set1(query[i]), of_next = set1(then[i]);
            float* at = to + i * wide;
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                const F after = fma(key, change[n], load(at + 16 * n) * keep);
                store(at + 16 * n, after);
                o[n] = fma(of_q, after, o[n]);
                s[n] = fma(of_next, after, s[n]);
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) store(out + 16 * n, o[n]);
    }
}

// A piece without prompt tokens that folds pending tokens, or leaves its own pending. It has at most DELTA_PENDING.
static void pending_delta(const Delta& d, const DeltaState& state, const DeltaPiece& p, const float* then,
                          const DeltaRoom& r) {
    constexpr int N = MAX_ROWS > 2 ? 4 : 2;  // as in decode_delta
    const int64_t dim = d.key_dim, wide = d.value_dim, share = d.value_heads / d.key_heads, head = p.head;
    const int64_t keys = d.key_heads * dim, values = d.value_heads * wide;
    float *q = r.x, *k = r.x + p.tokens * dim, *v = r.out, *copy = p.pends ? r.state : nullptr;
    float betas[DELTA_PENDING];
    convolve_pending(d, queries_of(d, state, head), p, state.inputs, r.past, q);
    convolve_pending(d, keys_of(d, state, head), p, state.inputs, r.past, k);
    for (int64_t t = 0; t < p.tokens; t++) {
        const F of_q = set1(unit_scale(q + t * dim, dim) / sqrtf((float)dim)), of_k = set1(unit_scale(k + t * dim, dim));
        for (int64_t c = t * dim; c < (t + 1) * dim; c += 16) {
            store(q + c, load(q + c) * of_q);
            store(k + c, load(k + c) * of_k);
        }
    }
    for (int64_t h = head * share; h < (head + 1) * share; h++) {
        float* s = state.state + h * dim * wide;
        const float* next = h + 1 < (head + 1) * share ? s + dim * wide : then ? then : s;
        Changes past{p.folded, keys, values, state.keys + head * dim, nullptr, {}};
        Changes now{p.tokens, dim, values, k, nullptr, {}};
        for (int64_t t = 0; t < p.folded; t++) past.grown[t] = state.decays[t * d.value_heads + h];
        for (int64_t t = 0; t < p.tokens; t++) {
            const Gates gates = gates_of(d, p.offset + t, h);
            now.grown[t] = expf(gates.g), betas[t] = gates.beta;
            if (p.pends) state.decays[t * d.value_heads + h] = now.grown[t];
        }
        convolve_pending(d, values_of(d, state, h), p, state.inputs, r.past, v);
        for (int64_t c = 0; c < wide;) {
            const int64_t count = c + 16 * N <= wide ? 16 * N : 16;
            const float* after = c + count < wide ? s + c + count : next;
            past.deltas = state.deltas + h * wide + c;
            now.deltas = p.pends ? past.deltas : nullptr;
            if (count > 16) pending_columns<N>(s + c, wide, dim, past, now, q, betas, copy, after, v + c);
            else pending_columns<1>(s + c, wide, dim, past, now, q, betas, copy, after, v + c);
            c += count;
        }
        for (int64_t t = 0; t < p.tokens; t++) gate_output(d, p.offset + t, h, v + t * wide);
    }
    for (int64_t t = 0; p.pends && t < p.tokens; t++)
        memcpy(state.keys + t * keys + head * dim, k + t * dim, sizeof(float) * dim);
}

// A piece of work: see Kernels.
static void delta(const Delta& d, const DeltaState& state, const DeltaPiece& p, const Soon& then, uint8_t* scratch) {
    const DeltaRoom r = carve_delta(scratch, d.key_dim, d.value_dim, d.taps);
    if (p.pends || (p.folded && p.tokens <= 1 && !p.prompts))
        return pending_delta(d, state, p, (const float*)then.at, r);
    if (p.folded) pending_delta(d, state, {p.head, p.offset, p.start, 0, 0, p.folded, false}, nullptr, r);
    int64_t done = 0;
    if (p.prompts) {
        const QueryMultiplier multiplier(MAX_QUERY_ROWS);
        const int64_t most = padded(d.key_dim > d.value_dim ? d.key_dim : d.value_dim);
        for (int64_t i = 0; i < most || i < CHUNK; i++) r.ones[i] = 1.0f;
        memset(r.sums, 0, sizeof(float) * CHUNK);
        while (done < p.prompts) {
            const int64_t position = p.start + done, rest = p.prompts - done, left = CHUNK - position % CHUNK;
            const int64_t count = rest < left ? rest : left;
            extend_delta(d, state, p.head, p.offset + done, count, position == 0, multiplier, r);
            done += count;
        }
    }
    for (; done < p.tokens; done++)
        decode_delta(d, state, p.head, p.offset + done, p.start + done == 0,
                     done + 1 == p.tokens ? (const float*)then.at : nullptr, r);
}
