// GatedDeltaNet: convolution, gated delta rule, gated norm. See level.cpp; pdk.h has the formulas' operands.
//
// A state S [key_dim][value_dim] of a value head changes with every token by its key k, value v, decay e^g and weight
// beta: S = e^g S, d = beta (v - k S), S = S + k (x) d; the output is q S. A decoded token does this in float32, in two
// passes over blocks of columns: the first computes k S, the second updates S and computes q S.
//
// A prompt is computed in chunks that end at multiples of CHUNK positions. With S the state before the chunk and G the
// running sum of g within it, the d of a chunk's tokens solve
//     d_i + beta_i sum over j < i of e^(G_i - G_j) (k_i k_j) d_j = beta_i (v_i - e^(G_i) k_i S)
// by forward substitution in float32. The output is e^(G_i) q_i S + sum over j <= i of e^(G_i - G_j) (q_i k_j) d_j, and
// the new state e^(G_n) S + sum of e^(G_n - G_j) k_j (x) d_j. Inputs of these products are rounded to bf16; states and
// sums are float32. The bits of a token depend on the position of its chunk's begin only.
#pragma once

constexpr int64_t CHUNK = DELTA_CHUNK;

struct DeltaRoom {
    float *past, *x, *state, *of_keys, *out, *key_scores, *query_scores, *rule, *sums, *grown, *late, *betas, *ones;
    float *unit_queries, *unit_keys, *steps, *running;  // [CHUNK][padded key_dim], where each row of a state has a decay
    bf16 *queries, *keys, *packed_keys, *turned_keys, *packed_state, *weights, *packed, *packed_late;
};

static DeltaRoom carve_delta(uint8_t* at, const Delta& d) {
    const int64_t key_dim = d.key_dim, value_dim = d.value_dim, taps = d.taps;
    const int64_t kd = padded(key_dim), vd = padded(value_dim), most = kd > vd ? kd : vd;
    const auto floats = [&](int64_t count) {
        float* p = (float*)at;
        at += (count * 4 + 63) / 64 * 64;
        return p;
    };
    const auto halves = [&](int64_t count) {
        bf16* p = (bf16*)at;
        at += (count * 2 + 63) / 64 * 64;
        return p;
    };
    DeltaRoom r;
    r.past = floats((taps + CHUNK) * most), r.x = floats(CHUNK * most);
    r.state = floats(kd * vd), r.of_keys = floats(CHUNK * vd), r.out = floats(CHUNK * vd);
    r.key_scores = floats(CHUNK * CHUNK), r.query_scores = floats(CHUNK * CHUNK), r.rule = floats(CHUNK * CHUNK);
    r.sums = floats(CHUNK), r.grown = floats(CHUNK), r.late = floats(CHUNK), r.betas = floats(CHUNK);
    r.ones = floats(most > CHUNK ? most : CHUNK);
    const int64_t by_channel = d.gates ? CHUNK * kd : 0;
    r.unit_queries = floats(by_channel), r.unit_keys = floats(by_channel);
    r.steps = floats(by_channel), r.running = floats(by_channel);
    r.queries = halves(CHUNK * kd), r.keys = halves(CHUNK * kd);
    r.packed_keys = halves(CHUNK * kd), r.turned_keys = halves(CHUNK * kd);
    r.packed_state = halves(kd * vd), r.weights = halves(CHUNK * CHUNK);
    r.packed = halves(CHUNK * vd), r.packed_late = halves(CHUNK * vd);
    return r;
}

// One head's channels of the convolution: `dim` columns from `column` on.
struct Channels {
    int64_t column, dim;
    bf16* kept;  // [dim][taps - 1]: the inputs before the next token
};

using Bits = uint32_t __attribute__((may_alias));

// Moves the inputs that a head keeps to rows of floats, [before][dim], and back. BEFORE: their number if it is constant.
template <int BEFORE>
INLINE void recall(const bf16* kept, int64_t dim, int64_t before, float* past) {
    Bits* to = (Bits*)past;
    const int64_t n = BEFORE ? BEFORE : before;
    for (int64_t c = 0; c < dim; c++)
        for (int64_t j = 0; j < n; j++) to[j * dim + c] = (Bits)kept[c * n + j] << 16;
}
template <int BEFORE>
INLINE void retain(const float* past, int64_t dim, int64_t before, bf16* kept) {
    const Bits* from = (const Bits*)past;
    const int64_t n = BEFORE ? BEFORE : before;
    for (int64_t c = 0; c < dim; c++)
        for (int64_t j = 0; j < n; j++) kept[c * n + j] = (bf16)(from[j * dim + c] >> 16);
}
INLINE void recall(const bf16* kept, int64_t dim, int64_t before, float* past) {
    before == 3 ? recall<3>(kept, dim, before, past) : recall<0>(kept, dim, before, past);
}
INLINE void retain(const float* past, int64_t dim, int64_t before, bf16* kept) {
    before == 3 ? retain<3>(past, dim, before, kept) : retain<0>(past, dim, before, kept);
}

// The columns of q, k and v.
INLINE int64_t channels_of(const Delta& d) { return 2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim; }

// Rounds the inputs of tokens [first, first + count) to bf16, as those that are kept: rows of floats.
INLINE void round_inputs(const Delta& d, const Channels& of, int64_t first, int64_t count, float* to) {
    alignas(64) bf16 rounded[16];
    for (int64_t t = 0; t < count; t++)
        for (int64_t c = 0; c < of.dim; c += 16) {
            store_half(rounded, load(d.in + (first + t) * d.stride + of.column + c));
            store(to + t * of.dim + c, load_half(rounded));
        }
}

// out[t] = silu of the convolution of the inputs past[t] to past[t + taps - 1], rows of floats.
INLINE void filter(const Delta& d, const Channels& of, int64_t count, const float* past, float* out, int64_t stride) {
    const int64_t dim = of.dim, channels = channels_of(d);
    for (int64_t c = 0; c < dim; c += 16)
        for (int64_t t = 0; t < count; t++) {
            F sum = zero();
            for (int64_t j = 0; j < d.taps; j++)
                sum = fma(load(d.conv + j * channels + of.column + c), load(past + (t + j) * dim + c), sum);
            store(out + t * stride + c, silu(sum));
        }
}

// out[t] = silu of the convolution of tokens [first, first + count), `stride` apart. `fresh`: no token precedes them.
static void convolve(const Delta& d, const Channels& of, int64_t first, int64_t count, bool fresh, float* past, float* out,
                     int64_t stride) {
    const int64_t dim = of.dim, before = d.taps - 1;
    if (fresh) memset(past, 0, sizeof(float) * before * dim);
    else recall(of.kept, dim, before, past);
    round_inputs(d, of, first, count, past + before * dim);
    filter(d, of, count, past, out, stride);
    retain(past + count * dim, dim, before, of.kept);
}

INLINE Channels queries_of(const Delta& d, const DeltaState& s, int64_t head) {
    return {head * d.key_dim, d.key_dim, s.conv_q + head * d.key_dim * (d.taps - 1)};
}
INLINE Channels keys_of(const Delta& d, const DeltaState& s, int64_t head) {
    return {(d.key_heads + head) * d.key_dim, d.key_dim, s.conv_k + head * d.key_dim * (d.taps - 1)};
}
INLINE Channels values_of(const Delta& d, const DeltaState& s, int64_t head) {
    return {2 * d.key_heads * d.key_dim + head * d.value_dim, d.value_dim, s.conv_v + head * d.value_dim * (d.taps - 1)};
}

INLINE float unit_scale(const float* x, int64_t n) {
    F s = zero();
    for (int64_t c = 0; c < n; c += 16) s = fma(load(x + c), load(x + c), s);
    return 1.0f / sqrtf(sum(s) + 1e-6f);
}

// g and beta of a token for a value head.
struct Gates {
    float g, beta;
};
INLINE Gates gates_of(const Delta& d, int64_t token, int64_t head) {
    const int64_t values = d.value_heads * d.value_dim;
    const float* b = d.in + token * d.stride + 2 * (d.key_heads * d.key_dim + values) + head;
    const float a = b[d.value_heads] + d.bias[head];
    return {d.decay[head] * (a > 20.0f ? a : log1pf(expf(a))), 1.0f / (1.0f + expf(-*b))};
}

// Where each row of a state has a decay: beta of a token for a value head, and the g of its rows.
INLINE float beta_of(const Delta& d, int64_t token, int64_t head) {
    return 1.0f / (1.0f + expf(-d.in[token * d.stride + channels_of(d) + head]));
}
INLINE void decays_of(const Delta& d, int64_t token, int64_t head, float* g) {
    const float *a = d.gates + token * d.gate_stride + head * d.key_dim, *bias = d.bias + head * d.key_dim;
    const F decay = set1(d.decay[head]);
    for (int64_t c = 0; c < d.key_dim; c += 16) store(g + c, decay * softplus(load(a + c) + load(bias + c)));
}
// Replaces g by e^g, and stores the keys times that.
INLINE void decayed_keys(const float* k, int64_t dim, float* g, float* out) {
    for (int64_t c = 0; c < dim; c += 16) {
        const F grown = exp(load(g + c));
        store(g + c, grown);
        store(out + c, load(k + c) * grown);
    }
}

// Writes the output of a value head for one token: normalised, times silu(z), or times sigmoid(z).
INLINE void gate_output(const Delta& d, int64_t token, int64_t head, const float* x) {
    const int64_t dim = d.value_dim, values = d.value_heads * dim;
    const float* z = d.in + token * d.stride + 2 * d.key_heads * d.key_dim + values + head * dim;
    float* out = d.out + token * values + head * dim;
    const F factor = set1(inverse_rms(x, dim, d.eps));
    if (d.gates) {
        z = d.gates + token * d.gate_stride + d.value_heads * d.key_dim + head * dim;
        for (int64_t c = 0; c < dim; c += 16)
            store(out + c, load(x + c) * factor * load(d.norm + c) * sigmoid(load(z + c)));
        return;
    }
    for (int64_t c = 0; c < dim; c += 16) store(out + c, load(x + c) * factor * load(d.norm + c) * silu(load(z + c)));
}

// Both passes over 16 * N columns of a state, whose rows are `stride` apart. v becomes the output. Prefetches as many
// columns from `next` on. `grown`: e^g, with CHANNELS of each row; `reads` are then the keys times that, and else k.
template <int N, bool CHANNELS>
INLINE void decode_columns(float* state, int64_t stride, int64_t rows, const float* q, const float* k,
                           const float* reads, const float* grown, float beta, const float* next, float* v) {
    F s[N], o[N];
    for (int n = 0; n < N; n++) s[n] = o[n] = zero();
    for (int64_t i = 0; i < rows; i++) {
        const F key = set1(reads[i]);
        const float* at = state + i * stride;
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            asm volatile("" ::: "memory");
            __builtin_prefetch(next + i * stride + 16 * n, 1, NEAREST);
            s[n] = fma(key, load(at + 16 * n), s[n]);
        }
    }
    const F once = set1(*grown), weight = set1(beta);
    for (int n = 0; n < N; n++) s[n] = (load(v + 16 * n) - (CHANNELS ? s[n] : s[n] * once)) * weight;
    for (int64_t i = 0; i < rows; i++) {
        const F key = set1(k[i]), query = set1(q[i]), keep = CHANNELS ? set1(grown[i]) : once;
        float* at = state + i * stride;
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            const F now = fma(key, s[n], load(at + 16 * n) * keep);
            store(at + 16 * n, now);
            o[n] = fma(query, now, o[n]);
        }
    }
    for (int n = 0; n < N; n++) store(v + 16 * n, o[n]);
}

// One decoded token of a piece.
template <bool CHANNELS>
static void decode_delta(const Delta& d, const DeltaState& state, int64_t head, int64_t token, bool fresh,
                         const float* then, const DeltaRoom& r) {
    constexpr int N = MAX_ROWS > 2 ? 4 : 2;  // by the number of registers
    const int64_t dim = d.key_dim, wide = d.value_dim, share = d.value_heads / d.key_heads;
    float *q = r.x, *k = r.x + dim, *v = r.out;
    convolve(d, queries_of(d, state, head), token, 1, fresh, r.past, q, dim);
    convolve(d, keys_of(d, state, head), token, 1, fresh, r.past, k, dim);
    const F of_q = set1(unit_scale(q, dim) / sqrtf((float)dim)), of_k = set1(unit_scale(k, dim));
    for (int64_t c = 0; c < dim; c += 16) {
        store(q + c, load(q + c) * of_q);
        store(k + c, load(k + c) * of_k);
    }
    for (int64_t h = head * share; h < (head + 1) * share; h++) {
        float* s = state.state + h * dim * wide;
        const float* next = h + 1 < (head + 1) * share ? s + dim * wide : then ? then : s;
        const float *reads = k, *grown;
        float beta, once;
        if (CHANNELS) {
            decays_of(d, token, h, r.steps);
            decayed_keys(k, dim, r.steps, r.unit_keys);
            reads = r.unit_keys, grown = r.steps, beta = beta_of(d, token, h);
        } else {
            const Gates gates = gates_of(d, token, h);
            once = expf(gates.g), grown = &once, beta = gates.beta;
        }
        if (fresh) memset(s, 0, sizeof(float) * dim * wide);
        convolve(d, values_of(d, state, h), token, 1, fresh, r.past, v, wide);
        for (int64_t c = 0; c < wide;) {
            const int64_t count = c + 16 * N <= wide ? 16 * N : 16;
            const float* after = c + count < wide ? s + c + count : next;
            if (count > 16) decode_columns<N, CHANNELS>(s + c, wide, dim, q, k, reads, grown, beta, after, v + c);
            else decode_columns<1, CHANNELS>(s + c, wide, dim, q, k, reads, grown, beta, after, v + c);
            c += count;
        }
        gate_output(d, token, h, v);
    }
}

// Packs rows of an even number as weights of as many inputs: [columns / 32][rows / 2][32][2]; row t is multiplied by
// scale[t].
INLINE void pack_rows(const float* x, int64_t rows, int64_t columns, const float* scale, bf16* out) {
    alignas(64) bf16 even[BLOCK], odd[BLOCK];
    for (int64_t t = 0; t < rows; t += 2)
        for (int64_t c = 0; c < columns; c += BLOCK) {
            const float *a = x + t * columns + c, *b = a + columns;
            const F u = set1(scale[t]), v = set1(scale[t + 1]);
            store_half(even, load(a) * u);
            store_half(even + 16, load(a + 16) * u);
            store_half(odd, load(b) * v);
            store_half(odd + 16, load(b + 16) * v);
            P first, last;
            zip(pairs(even), pairs(odd), first, last);
            bf16* to = out + (c / BLOCK * (rows / 2) + t / 2) * 64;
            store_pairs(to, first);
            store_pairs(to + 32, last);
        }
}

// out = (KEEPS: keep[r] * out[r] +) x [rows][k] times packed weights of `k` inputs. LOWER_OUT: only the blocks of `out`
// on and below the diagonal are needed. LOWER_IN: x is 0 above the diagonal.
template <bool KEEPS, bool LOWER_OUT, bool LOWER_IN>
static void multiply(const QueryMultiplier& multiplier, const bf16* w, int64_t k, int64_t columns, const bf16* x,
                     int64_t rows, float* out, int64_t stride, const float* keep) {
    for (int64_t c = 0; c < columns; c += QueryMultiplier::WIDE)
        by_tiles(rows, MAX_QUERY_ROWS, true, [&](int64_t row, int64_t n, int64_t) {
            if (LOWER_OUT && row + n <= c) return;
            const int64_t used = LOWER_IN && row + n < k ? padded(row + n) : k;
            multiplier.times<KEEPS>(w + c * k, columns - c, k, used, x + row * k, k, n, out + row * stride + c, stride,
                                    keep + row);
        });
}

// Convolved queries or keys of a chunk, of length 1 times `scale`, in bf16 [CHUNK][padded dim]; 0 elsewhere.
static void unit_rows(const Delta& d, const Channels& of, int64_t first, int64_t count, bool fresh, float scale,
                      const DeltaRoom& r, bf16* out) {
    const int64_t kd = padded(of.dim);
    convolve(d, of, first, count, fresh, r.past, r.x, of.dim);
    memset(out, 0, sizeof(bf16) * CHUNK * kd);
    for (int64_t t = 0; t < count; t++) {
        const F factor = set1(unit_scale(r.x + t * of.dim, of.dim) * scale);
        for (int64_t c = 0; c < of.dim; c += 16) store_half(out + t * kd + c, load(r.x + t * of.dim + c) * factor);
    }
}

// Packs rows [rows][wide], a multiple of 32, as weights of as many outputs: [rows / 32][wide / 2][32][2].
INLINE void pack_keys(const bf16* keys, int64_t rows, int64_t wide, bf16* packed) {
    for (int64_t g = 0; g < rows; g += 16)
        for (int64_t c = 0; c < wide; c += 32) {
            P x[16];
            for (int i = 0; i < 16; i++) x[i] = pairs(keys + (g + i) * wide + c);
            transpose(x);
            bf16* to = packed + (g / 32 * (wide / 2) + c / 2) * 64 + g % 32 * 2;
            for (int j = 0; j < 16; j++) store_pairs(to + j * 64, x[j]);
        }
}
// Turns the CHUNK rows that pack_keys has packed: [wide][CHUNK].
INLINE void turn_keys(const bf16* packed, int64_t wide, bf16* turned) {
    for (int64_t g = 0; g < CHUNK; g += 16)
        for (int64_t c = 0; c < wide; c++) {
            const bf16* from = packed + (g / 32 * (wide / 2) + c / 2) * 64 + g % 32 * 2 + c % 2;
            for (int64_t i = 0; i < 16; i++) turned[c * CHUNK + g + i] = from[2 * i];
        }
}

// The decays between a chunk's tokens, in the weights of its outputs and in the coefficients of its rule.
INLINE void weigh_chunk(const DeltaRoom& r, int64_t count) {
    memset(r.weights, 0, sizeof(bf16) * CHUNK * CHUNK);
    for (int64_t i = 0; i < count; i++) {
        const F now = set1(r.sums[i]), beta = set1(r.betas[i]);
        for (int64_t j = 0; j <= i; j += 16) {
            const F decay = exp(now - load(r.sums + j));
            const int64_t at = i * CHUNK + j;
            store_half(r.weights + at, within(load(r.query_scores + at) * decay, zero(), 0, i + 1 - j));
            store(r.rule + at, load(r.key_scores + at) * decay * beta);
        }
    }
}

// Solves the rule in place for `count` rows of 16 * N columns of x, `stride` apart.
template <int N>
INLINE void solve_columns(const float* rule, int64_t count, float* x, int64_t stride) {
    for (int64_t i = 1; i < count; i++) {
        F s[N];
        for (int n = 0; n < N; n++) s[n] = load(x + i * stride + 16 * n);
        for (int64_t j = 0; j < i; j++) {
            const F factor = set1(-rule[i * CHUNK + j]);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) s[n] = fma(factor, load(x + j * stride + 16 * n), s[n]);
        }
        for (int n = 0; n < N; n++) store(x + i * stride + 16 * n, s[n]);
    }
}

INLINE void solve_rule(const float* rule, int64_t count, float* x, int64_t columns) {
    int64_t c = 0;
    for (; c + 64 <= columns; c += 64) solve_columns<4>(rule, count, x + c, columns);
    for (; c < columns; c += 16) solve_columns<1>(rule, count, x + c, columns);
}

// Tokens [first, first + count) of a prompt, which lie in one chunk.
static void extend_delta(const Delta& d, const DeltaState& state, int64_t head, int64_t first, int64_t count, bool fresh,
                         const QueryMultiplier& multiplier, const DeltaRoom& r) {
    const int64_t dim = d.key_dim, wide = d.value_dim, kd = padded(dim), vd = padded(wide);
    const int64_t share = d.value_heads / d.key_heads;
    unit_rows(d, queries_of(d, state, head), first, count, fresh, 1.0f / sqrtf((float)dim), r, r.queries);
    unit_rows(d, keys_of(d, state, head), first, count, fresh, 1.0f, r, r.keys);
    pack_keys(r.keys, CHUNK, kd, r.packed_keys);
    turn_keys(r.packed_keys, kd, r.turned_keys);
    multiply<false, true, false>(multiplier, r.packed_keys, kd, CHUNK, r.queries, count, r.query_scores, CHUNK, r.ones);
    multiply<false, true, false>(multiplier, r.packed_keys, kd, CHUNK, r.keys, count, r.key_scores, CHUNK, r.ones);
    for (int64_t h = head * share; h < (head + 1) * share; h++) {
        float *s = state.state + h * dim * wide, *x = r.x;
        memset(r.state, 0, sizeof(float) * kd * vd);
        if (!fresh)
            for (int64_t i = 0; i < dim; i++) memcpy(r.state + i * vd, s + i * wide, sizeof(float) * wide);
        pack_rows(r.state, kd, vd, r.ones, r.packed_state);
        multiply<false, false, false>(multiplier, r.packed_state, kd, vd, r.keys, count, r.of_keys, vd, r.ones);
        multiply<false, false, false>(multiplier, r.packed_state, kd, vd, r.queries, count, r.out, vd, r.ones);
        memset(x, 0, sizeof(float) * CHUNK * vd);
        convolve(d, values_of(d, state, h), first, count, fresh, r.past, x, vd);
        float sum = 0.0f;
        for (int64_t t = 0; t < count; t++) {
            const Gates gates = gates_of(d, first + t, h);
            r.sums[t] = sum += gates.g, r.betas[t] = gates.beta, r.grown[t] = expf(sum);
            const F grown = set1(r.grown[t]), beta = set1(gates.beta);
            for (int64_t c = t * vd; c < (t + 1) * vd; c += 16) {
                store(x + c, (load(x + c) - load(r.of_keys + c) * grown) * beta);
                store(r.out + c, load(r.out + c) * grown);
            }
        }
        for (int64_t t = 0; t < CHUNK; t++) r.late[t] = t < count ? expf(sum - r.sums[t]) : 0.0f;
        weigh_chunk(r, count);
        solve_rule(r.rule, count, x, vd);
        pack_rows(x, CHUNK, vd, r.ones, r.packed);
        pack_rows(x, CHUNK, vd, r.late, r.packed_late);
        multiply<true, false, true>(multiplier, r.packed, CHUNK, vd, r.weights, count, r.out, vd, r.ones);
        float* keep = r.of_keys;  // no longer needed
        for (int64_t i = 0; i < kd; i++) keep[i] = r.grown[count - 1];
        multiply<true, false, false>(multiplier, r.packed_late, CHUNK, vd, r.turned_keys, kd, r.state, vd, keep);
        for (int64_t i = 0; i < dim; i++) memcpy(s + i * wide, r.state + i * vd, sizeof(float) * wide);
        for (int64_t t = 0; t < count; t++) gate_output(d, first + t, h, r.out + t * vd);
    }
}
