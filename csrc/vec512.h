// Sixteen floats, thirty-two bf16 or sixty-four bytes in one AVX-512 register. Included by level.cpp only.
#pragma once

struct F { __m512 v; };   // 16 floats
struct P { __m512i v; };  // 32 bf16 (16 pairs), or 64 bytes (16 quads)
struct I { __m512i v; };  // 16 int32

#ifdef __AVX512BF16__
constexpr int MAX_ROWS = 12;  // rows of a product in registers: 24 accumulators
#else
constexpr int MAX_ROWS = 8;
#endif

INLINE __mmask16 below16(int64_t n) { return n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1); }
INLINE __mmask32 below32(int64_t n) { return n >= 32 ? 0xffffffffu : (1u << n) - 1; }

INLINE F zero() { return {_mm512_setzero_ps()}; }
INLINE F set1(float x) { return {_mm512_set1_ps(x)}; }
INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE F load_n(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(below16(n), p)}; }
INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
INLINE void store_n(float* p, F a, int64_t n) { _mm512_mask_storeu_ps(p, below16(n), a.v); }
INLINE F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
INLINE F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
INLINE F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
INLINE F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
INLINE F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
INLINE F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
INLINE F abs(F a) { return {_mm512_abs_ps(a.v)}; }
INLINE F round(F a) { return {_mm512_roundscale_ps(a.v, 8)}; }
INLINE F scale2(F a, F n) { return {_mm512_scalef_ps(a.v, n.v)}; }  // a * 2^n, n whole
INLINE float sum(F a) { return _mm512_reduce_add_ps(a.v); }
INLINE float top(F a) { return _mm512_reduce_max_ps(a.v); }
// `then` where a is at least `least`; 0 elsewhere, including where a is NaN.
INLINE F or_zero(F a, F least, F then) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, least.v, _CMP_GE_OQ), then.v)};
}
// Lanes [low, high) of a, and b elsewhere.
INLINE F within(F a, F b, int64_t low, int64_t high) {
    __mmask16 keep = (high <= 0 ? 0 : below16(high)) & (low <= 0 ? 0xffff : (__mmask16)~below16(low));
    return {_mm512_mask_blend_ps(keep, b.v, a.v)};
}

INLINE I izero() { return {_mm512_setzero_si512()}; }
INLINE I iset1(int32_t x) { return {_mm512_set1_epi32(x)}; }
INLINE F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
INLINE I to_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }
INLINE int32_t isum(I a) { return _mm512_reduce_add_epi32(a.v); }
INLINE I operator+(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
INLINE void store_bytes(int8_t* p, I a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }

INLINE I load_bytes(const int8_t* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
// Sixteen codes of FP8 E4M3. The exponent is placed 120 higher; below 2^-6 that adds 2^-7, which the minimum removes.
INLINE F load_e4m3(const uint8_t* p) {
    const __m512i x = load_bytes((const int8_t*)p).v;
    const __m512i low = _mm512_slli_epi32(_mm512_and_si512(x, _mm512_set1_epi32(0x7f)), 20);
    __m512 v = _mm512_castsi512_ps(_mm512_add_epi32(low, _mm512_set1_epi32(120 << 23)));
    v = _mm512_min_ps(v, _mm512_fmadd_ps(v, _mm512_set1_ps(2.0f), _mm512_set1_ps(-0x1p-6f)));
    const __m512i sign = _mm512_and_si512(x, _mm512_set1_epi32((int)0x80000000));
    return {_mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(v), sign))};
}

// Of each word, the code of FP8 E4M3 in the low or high byte, as float16 of 2^-8 times its value.
INLINE P low_e4m3(__m512i x) { return {_mm512_and_si512(_mm512_srai_epi16(x, 1), _mm512_set1_epi16((short)0xbf80))}; }
INLINE P low_e4m3(P x) { return low_e4m3(_mm512_slli_epi16(x.v, 8)); }
INLINE P high_e4m3(P x) { return low_e4m3(x.v); }
// The first and last 16 of 32 float16.
INLINE void widen_float16(P x, F& first, F& last) {
    first.v = _mm512_cvtph_ps(_mm512_castsi512_si256(x.v));
    last.v = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x.v, 1));
}
// Each of eight floats twice.
INLINE F load_twice(const float* p) {
    const __m512i twice = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    return {_mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_loadu_ps(p)))};
}
// Of each word, the code of E2M1 in bits [4 * N, 4 * N + 4), as bf16.
template <int N>
INLINE P e2m1(P x) {
    const __m512i values = _mm512_broadcast_i64x4(_mm256_setr_epi16(
        0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, (short)0x8000, (short)0xbf00, (short)0xbf80,
        (short)0xbfc0, (short)0xc000, (short)0xc040, (short)0xc080, (short)0xc0c0));
    return {_mm512_permutexvar_epi16(_mm512_srli_epi16(x.v, 4 * N), values)};  // ignores all but the low five bits
}
// What sixteen exponents add to bf16, each twice.
INLINE P load_exponents(const int8_t* p) {
    const __m512i e = _mm512_and_si512(_mm512_slli_epi32(load_bytes(p).v, 7), _mm512_set1_epi32(0xffff));
    return {_mm512_or_si512(e, _mm512_slli_epi32(e, 16))};
}
// bf16 times powers of two from load_exponents.
INLINE P scale_half(P x, P e) {
    const __mmask32 is_some = _mm512_test_epi16_mask(x.v, _mm512_set1_epi16(0x7fff));
    return {_mm512_mask_add_epi16(x.v, is_some, x.v, e.v)};
}

INLINE P pairs(const void* p) { return {_mm512_loadu_si512(p)}; }
INLINE P pairs_n(const bf16* p, int64_t n) { return {_mm512_maskz_loadu_epi16(below32(n), p)}; }
INLINE P pzero() { return {_mm512_setzero_si512()}; }
INLINE P low_bits(P a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }  // of each byte, the low four
INLINE P high_bits(P a) { return low_bits({_mm512_srli_epi16(a.v, 4)}); }
INLINE P spread(const void* p) { int32_t x; memcpy(&x, p, 4); return {_mm512_set1_epi32(x)}; }
INLINE void store_pairs(void* p, P a) { _mm512_storeu_si512(p, a.v); }
INLINE F load_half(const bf16* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
INLINE F load_half_n(const bf16* p, int64_t n) {
    __m256i x = _mm256_maskz_loadu_epi16(below16(n), p);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))};
}
INLINE __m256i halves(F a) {  // to nearest, ties to even; NaN stays NaN
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(a.v);
#else
    __m512i u = _mm512_castps_si512(a.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    r = _mm512_mask_mov_epi32(r, nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
#endif
}
INLINE void store_half(bf16* p, F a) { _mm256_storeu_si256((__m256i*)p, halves(a)); }
INLINE P join_halves(F a, F b) {
#ifdef __AVX512BF16__
    return {(__m512i)_mm512_cvtne2ps_pbh(b.v, a.v)};
#else
    return {_mm512_inserti64x4(_mm512_castsi256_si512(halves(a)), halves(b), 1)};
#endif
}
INLINE void store_half_n(bf16* p, F a, int64_t n) { _mm256_mask_storeu_epi16(p, below16(n), halves(a)); }

// acc + a.even * b.even + a.odd * b.odd, for each of 16 pairs of bf16.
INLINE F dot2(F acc, P a, P b) {
#ifdef __AVX512BF16__
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)};
#else
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    acc.v = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16)),
                            _mm512_castsi512_ps(_mm512_slli_epi32(b.v, 16)), acc.v);
    return {_mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a.v, high)),
                            _mm512_castsi512_ps(_mm512_and_si512(b.v, high)), acc.v)};
#endif
}

// acc + the sum of four products of unsigned (a) and signed (b) bytes.
INLINE I dot4(I acc, P a, P b) {
#ifdef __AVX512VNNI__
    return {_mm512_dpbusd_epi32(acc.v, a.v, b.v)};
#else
    const __m512i low = _mm512_set1_epi16(0xff);
    __m512i even = _mm512_madd_epi16(_mm512_and_si512(a.v, low), _mm512_srai_epi16(_mm512_slli_epi16(b.v, 8), 8));
    __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(a.v, 8), _mm512_srai_epi16(b.v, 8));
    return {_mm512_add_epi32(acc.v, _mm512_add_epi32(even, odd))};
#endif
}

// Interleaves two rows of 32 bf16 to pairs (a[i], b[i]): the first 16 and the last 16.
INLINE void zip(P a, P b, P& first, P& last) {
    const __m512i even = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1,
        32, 0);
    first.v = _mm512_permutex2var_epi16(a.v, even, b.v);
    last.v = _mm512_permutex2var_epi16(a.v, _mm512_add_epi16(even, _mm512_set1_epi16(16)), b.v);
}

// fold_four folds each of four vectors into four lanes. fold_sixteen folds four such results, in order, into sixteen
// lanes.
template <class Op>
INLINE F fold_four(const F* r, Op op) {
    F x = op(F{_mm512_unpacklo_ps(r[0].v, r[1].v)}, F{_mm512_unpackhi_ps(r[0].v, r[1].v)});
    F y = op(F{_mm512_unpacklo_ps(r[2].v, r[3].v)}, F{_mm512_unpackhi_ps(r[2].v, r[3].v)});
    return op(F{_mm512_shuffle_ps(x.v, y.v, 0x44)}, F{_mm512_shuffle_ps(x.v, y.v, 0xee)});
}
template <class Op>
INLINE F fold_sixteen(const F* c, Op op) {
    F x = op(F{_mm512_shuffle_f32x4(c[0].v, c[1].v, 0x44)}, F{_mm512_shuffle_f32x4(c[0].v, c[1].v, 0xee)});
    F y = op(F{_mm512_shuffle_f32x4(c[2].v, c[3].v, 0x44)}, F{_mm512_shuffle_f32x4(c[2].v, c[3].v, 0xee)});
    return op(F{_mm512_shuffle_f32x4(x.v, y.v, 0x88)}, F{_mm512_shuffle_f32x4(x.v, y.v, 0xdd)});
}

// Transposes sixteen rows of sixteen 32-bit items in place.
INLINE void transpose(P (&a)[16]) {
    __m512i t[16];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        P* r = a + 4 * i;
        __m512i x0 = _mm512_unpacklo_epi32(r[0].v, r[1].v), x1 = _mm512_unpackhi_epi32(r[0].v, r[1].v);
        __m512i x2 = _mm512_unpacklo_epi32(r[2].v, r[3].v), x3 = _mm512_unpackhi_epi32(r[2].v, r[3].v);
        t[4 * i] = _mm512_unpacklo_epi64(x0, x2);
        t[4 * i + 1] = _mm512_unpackhi_epi64(x0, x2);
        t[4 * i + 2] = _mm512_unpacklo_epi64(x1, x3);
        t[4 * i + 3] = _mm512_unpackhi_epi64(x1, x3);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512i y0 = _mm512_shuffle_i32x4(t[j], t[4 + j], 0x44), y1 = _mm512_shuffle_i32x4(t[j], t[4 + j], 0xee);
        __m512i y2 = _mm512_shuffle_i32x4(t[8 + j], t[12 + j], 0x44);
        __m512i y3 = _mm512_shuffle_i32x4(t[8 + j], t[12 + j], 0xee);
        a[j].v = _mm512_shuffle_i32x4(y0, y2, 0x88);
        a[4 + j].v = _mm512_shuffle_i32x4(y0, y2, 0xdd);
        a[8 + j].v = _mm512_shuffle_i32x4(y1, y3, 0x88);
        a[12 + j].v = _mm512_shuffle_i32x4(y1, y3, 0xdd);
    }
}
