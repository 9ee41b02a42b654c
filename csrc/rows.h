// Row arithmetic: exp, silu, norms, quantization, argmax, sampling weights. Included by level.cpp only.
#pragma once

struct Add {
    __attribute__((always_inline)) F operator()(F a, F b) const { return a + b; }
};
struct Most {
    __attribute__((always_inline)) F operator()(F a, F b) const { return max(a, b); }
};

// e^x, within 2 units in the last place; about 1e-38 below -87. Uses Cephes' polynomial.
INLINE F exp(F x) {
    x = min(max(x, set1(-87.3f)), set1(88.0f));
    F n = round(x * set1(1.44269504f));
    F r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    F p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, r * r, r + set1(1.0f));
    return scale2(p, n);
}
INLINE float exp1(float x) {
    float lanes[16];
    store(lanes, exp(set1(x)));
    return lanes[0];
}
INLINE F silu(F x) { return x / (set1(1.0f) + exp(zero() - x)); }
INLINE F sigmoid(F x) { return set1(1.0f) / (set1(1.0f) + exp(zero() - x)); }
// log(1 + e^x), within a few units in the last place: with u = e^-|x| it is the larger of x and 0, plus the logarithm of
// 1 + u, a series in u / (2 + u).
INLINE F softplus(F x) {
    const F u = exp(zero() - abs(x)), s = u / (u + set1(2.0f)), t = s * s;
    F p = set1(1.0f / 13.0f);
    p = fma(p, t, set1(1.0f / 11.0f));
    p = fma(p, t, set1(1.0f / 9.0f));
    p = fma(p, t, set1(1.0f / 7.0f));
    p = fma(p, t, set1(1.0f / 5.0f));
    p = fma(p, t, set1(1.0f / 3.0f));
    p = fma(p, t, set1(1.0f));
    return max(x, zero()) + (s + s) * p;
}
// x times half of 1 + tanh(u) is x * sigmoid(2 u).
INLINE F gelu_tanh(F x) {
    const F twice = set1(1.5957691216f), cubic = set1(0.044715f);  // 2 * sqrt(2 / pi)
    return x * sigmoid(twice * fma(cubic * x * x, x, x));
}
INLINE F tanh(F x) {
    F e = exp(x + x);  // exp clamps its argument, so that the result is 1 or -1 for large |x|
    return (e - set1(1.0f)) / (e + set1(1.0f));
}

// Soft-caps scores to (-softcap, softcap); softcap 0 returns them unchanged.
INLINE F bend(F s, float softcap) { return softcap > 0.0f ? tanh(s * set1(1.0f / softcap)) * set1(softcap) : s; }

INLINE float inverse_rms(const float* x, int64_t n, float eps) {
    F s = zero();
    for (int64_t c = 0; c < n; c += 16) {
        F v = load_n(x + c, n - c);
        s = fma(v, v, s);
    }
    return 1.0f / sqrtf(sum(s) / (float)n + eps);
}

// Stores 32 columns of one row of an operand.
INLINE void put_block(const Operand& o, int64_t row, int64_t column, F a, F b) {
    if (o.format == Format::bf16) {
        store_half(o.half + row * o.k + column, a);
        store_half(o.half + row * o.k + column + 16, b);
        return;
    }
    const int64_t group = (row * o.k + column) / BLOCK;
    float most = top(max(abs(a), abs(b)));
    if (!(most > 1e-30f)) most = 1e-30f;
    F inverse = set1(127.0f / most);
    I x = to_int(a * inverse), y = to_int(b * inverse);
    o.scale[group] = most / 127.0f;
    o.offset[group] = -128 * isum(x + y);
    store_bytes(o.quarter + row * o.k + column, x);
    store_bytes(o.quarter + row * o.k + column + 16, y);
}

// Index of the maximum; ties go to the lower index. A NaN is skipped unless all are NaN.
static int64_t argmax(const float* x, int64_t n) {
    float most = -INFINITY;
    int64_t block = 0;
    for (int64_t at = 0; at < n; at += CHOICE_BLOCK) {
        const int64_t end = n - at < CHOICE_BLOCK ? n : at + CHOICE_BLOCK;
        F best = set1(-INFINITY);
        for (int64_t c = at; c < end; c += 16) best = max(within(load_n(x + c, end - c), best, 0, end - c), best);
        const float here = top(best);
        if (here > most) most = here, block = at;
    }
    for (int64_t i = block; i < n; i++)
        if (x[i] == most) return i;
    return 0;
}

static double weigh(const float* x, int64_t n, float most, float temperature, float* out) {
    const F shift = set1(most), scale = set1(temperature), least = set1(-87.0f);
    double total = 0.0;
    for (int64_t block = 0; block < n; block += CHOICE_BLOCK) {
        const int64_t end = n - block < CHOICE_BLOCK ? n : block + CHOICE_BLOCK;
        F s = zero();
        for (int64_t c = block; c < end; c += 16) {
            F a = (load_n(x + c, end - c) - shift) / scale;
            F e = within(or_zero(a, least, exp(a)), zero(), 0, end - c);
            store_n(out + c, e, end - c);
            s = s + e;
        }
        total += sum(s);
    }
    return total;
}

static void keep(float* weights, int64_t n, float floor, float* sums) {
    const F least = set1(floor);
    for (int64_t block = 0; block < n; block += CHOICE_BLOCK) {
        const int64_t end = n - block < CHOICE_BLOCK ? n : block + CHOICE_BLOCK;
        F s = zero();
        for (int64_t c = block; c < end; c += 16) {
            F a = load_n(weights + c, end - c), e = or_zero(a, least, a);
            store_n(weights + c, e, end - c);
            s = s + e;
        }
        sums[block / CHOICE_BLOCK] = sum(s);
    }
}

static void mix(const float* rows, int64_t columns, const int64_t* places, const float* weights, int64_t count,
                float* out, bool add) {
    for (int64_t c = 0; c < columns; c += 16) {
        F total = add ? load_n(out + c, columns - c) : zero();
        for (int64_t i = 0; i < count; i++)
            total = fma(set1(weights[i]), load_n(rows + places[i] * columns + c, columns - c), total);
        store_n(out + c, total, columns - c);
    }
}

static void gate(const float* x, const float* gate, bool one, int64_t columns, float* out, bool add) {
    const F same = sigmoid(set1(*gate));
    for (int64_t c = 0, n; c < columns; c += 16) {
        n = columns - c;
        F value = load_n(x + c, n) * (one ? same : sigmoid(load_n(gate + c, n)));
        store_n(out + c, add ? load_n(out + c, n) + value : value, n);
    }
}

static void widen(const bf16* x, float scale, float* out, int64_t n) {
    for (int64_t c = 0; c < n; c += 16) store_n(out + c, load_half_n(x + c, n - c) * set1(scale), n - c);
}

static void add(const float* x, int64_t columns, const float* norm, float eps, float scale, float* out, int64_t first,
                int64_t last) {
    const F by = set1(scale), factor = set1(norm ? inverse_rms(x, columns, eps) : 1.0f);
    for (int64_t c = first, n; c < last; c += 16) {
        n = last - c;
        F value = load_n(x + c, n);
        if (norm) value = value * factor * load_n(norm + c, n);
        store_n(out + c, fma(value, by, load_n(out + c, n)), n);
    }
}

static void cap(float* x, int64_t n, float scale, float softcap) {
    for (int64_t c = 0; c < n; c += 16) store_n(x + c, bend(load_n(x + c, n - c) * set1(scale), softcap), n - c);
}

