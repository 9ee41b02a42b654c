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

// Tokens that change a state: k, d and e^g of token t are `key_stride`, `delta_stride` and `decay_stride` after those of
// the one before. There is one e^g, or with CHANNELS one of each row.
struct Changes {
    int64_t count, key_stride, delta_stride, decay_stride;
    const float *keys, *decays;
    float* deltas;
};

// Passes over 16 * N columns of a state: folds `past` into it, and applies the tokens `now` in place, or with `copy` to
// a copy there. `q` and the keys of `now` are rows of `rows` floats. v, rows of `stride` floats, become the outputs.
// The deltas of `now` are stored, if not null, as far apart as those of `past`. `reads`: see decode_columns.
template <int N, bool CHANNELS>
INLINE void pending_columns(float* state, int64_t stride, int64_t rows, const Changes& past, const Changes& now,
                            const float* q, const float* reads, const float* betas, float* copy, const float* next,
                            float* v) {
    const int64_t folds = past.count, tokens = now.count, wide = copy ? 16 * N : stride;
    const int64_t key_stride = past.key_stride, delta_stride = past.delta_stride;
    const float *past_keys = past.keys, *past_deltas = past.deltas, *past_decays = past.decays, *keys = now.keys;
    const int64_t decay_stride = past.decay_stride;
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
            const F key = set1(past_keys[t * key_stride + i]);
            const F keep = set1(past_decays[t * decay_stride + (CHANNELS ? i : 0)]);
            const float* delta = past_deltas + t * delta_stride;
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) x[n] = fma(key, load(delta + 16 * n), x[n] * keep);
        }
        const F key = set1(tokens ? reads[i] : 0.0f);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            if (folds) store(at + 16 * n, x[n]);
            if (copy) store(to + i * wide + 16 * n, x[n]);
            s[n] = fma(key, x[n], s[n]);
        }
    }
    for (int64_t t = 0; t < tokens; t++) {
        const float* decays = now.decays + t * now.decay_stride;
        const F once = set1(*decays), weight = set1(betas[t]);
        const float *k = keys + t * rows, *query = q + t * rows, *then = reads + (t + 1 < tokens ? t + 1 : t) * rows;
        float* out = v + t * stride;
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            change[n] = (load(out + 16 * n) - (CHANNELS ? s[n] : s[n] * once)) * weight;
            if (deltas) store(deltas + t * delta_stride + 16 * n, change[n]);
            s[n] = o[n] = zero();
        }
        for (int64_t i = 0; i < rows; i++) {
            const F key = set1(k[i]), of_q = set1(query[i]), of_next = set1(then[i]);
            const F keep = CHANNELS ? set1(decays[i]) : once;
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
template <bool CHANNELS>
static void pending_delta(const Delta& d, const DeltaState& state, const DeltaPiece& p, const float* then,
                          const DeltaRoom& r) {
    constexpr int N = MAX_ROWS > 2 ? 4 : 2;  // as in decode_delta
    const int64_t dim = d.key_dim, wide = d.value_dim, share = d.value_heads / d.key_heads, head = p.head;
    const int64_t keys = d.key_heads * dim, values = d.value_heads * wide;
    float *q = r.x, *k = r.x + p.tokens * dim, *v = r.out, *copy = p.pends ? r.state : nullptr;
    const int64_t decays = CHANNELS ? dim : 1, decay_stride = d.value_heads * decays;  // of a head, and of a token
    float betas[DELTA_PENDING], once[DELTA_PENDING];
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
        float* kept = state.decays + h * decays;
        Changes past{p.folded, keys, values, decay_stride, state.keys + head * dim, kept, nullptr};
        Changes now{p.tokens, dim, values, decays, k, CHANNELS ? r.steps : once, nullptr};
        const float* reads = CHANNELS ? r.unit_keys : k;
        float past_once[DELTA_PENDING];  // the tokens of `now` overwrite what is kept
        if (!CHANNELS) {
            for (int64_t t = 0; t < p.folded; t++) past_once[t] = kept[t * decay_stride];
            past.decays = past_once, past.decay_stride = 1;
        }
        for (int64_t t = 0; t < p.tokens; t++) {
            if (CHANNELS) {
                decays_of(d, p.offset + t, h, r.steps + t * dim);
                decayed_keys(k + t * dim, dim, r.steps + t * dim, r.unit_keys + t * dim);
                betas[t] = beta_of(d, p.offset + t, h);
            } else {
                const Gates gates = gates_of(d, p.offset + t, h);
                once[t] = expf(gates.g), betas[t] = gates.beta;
                if (p.pends) kept[t * decay_stride] = once[t];
            }
        }
        convolve_pending(d, values_of(d, state, h), p, state.inputs, r.past, v);
        for (int64_t c = 0; c < wide;) {
            const int64_t count = c + 16 * N <= wide ? 16 * N : 16;
            const float* after = c + count < wide ? s + c + count : next;
            past.deltas = state.deltas + h * wide + c;
            now.deltas = p.pends ? past.deltas : nullptr;
            if (count > 16) pending_columns<N, CHANNELS>(s + c, wide, dim, past, now, q, reads, betas, copy, after, v + c);
            else pending_columns<1, CHANNELS>(s + c, wide, dim, past, now, q, reads, betas, copy, after, v + c);
            c += count;
        }
        for (int64_t t = 0; CHANNELS && p.pends && t < p.tokens; t++)  // only now: the passes read what was kept
            memcpy(kept + t * decay_stride, r.steps + t * dim, sizeof(float) * dim);
        for (int64_t t = 0; t < p.tokens; t++) gate_output(d, p.offset + t, h, v + t * wide);
    }
    for (int64_t t = 0; p.pends && t < p.tokens; t++)
        memcpy(state.keys + t * keys + head * dim, k + t * dim, sizeof(float) * dim);
}

// A piece of work: see Kernels.
template <bool CHANNELS>
static void delta_piece(const Delta& d, const DeltaState& state, const DeltaPiece& p, const Soon& then,
                        uint8_t* scratch) {
    const DeltaRoom r = carve_delta(scratch, d);
    if (p.pends || (p.folded && p.tokens <= 1 && !p.prompts))
        return pending_delta<CHANNELS>(d, state, p, (const float*)then.at, r);
    if (p.folded) pending_delta<CHANNELS>(d, state, {p.head, p.offset, p.start, 0, 0, p.folded, false}, nullptr, r);
    int64_t done = 0;
    if (p.prompts) {
        const QueryMultiplier multiplier(MAX_QUERY_ROWS);
        const int64_t most = padded(d.key_dim > d.value_dim ? d.key_dim : d.value_dim);
        for (int64_t i = 0; i < most || i < CHUNK; i++) r.ones[i] = 1.0f;
        memset(r.sums, 0, sizeof(float) * CHUNK);
        while (done < p.prompts) {
            const int64_t position = p.start + done, rest = p.prompts - done, left = CHUNK - position % CHUNK;
            const int64_t count = rest < left ? rest : left;
            if (CHANNELS) extend_channels(d, state, p.head, p.offset + done, count, position == 0, multiplier, r);
            else extend_delta(d, state, p.head, p.offset + done, count, position == 0, multiplier, r);
            done += count;
        }
    }
    for (; done < p.tokens; done++)
        decode_delta<CHANNELS>(d, state, p.head, p.offset + done, p.start + done == 0,
                               done + 1 == p.tokens ? (const float*)then.at : nullptr, r);
}

static void delta(const Delta& d, const DeltaState& state, const DeltaPiece& p, const Soon& then, uint8_t* scratch) {
    if (d.gates) delta_piece<true>(d, state, p, then, scratch);
    else delta_piece<false>(d, state, p, then, scratch);
}
