// The vectors of vec512.h as two AVX2 registers each. Included by level.cpp only.
#pragma once

struct F { __m256 a, b; };
struct P { __m256i a, b; };
struct I { __m256i a, b; };

constexpr int MAX_ROWS = 2;

INLINE __m256i first_lanes(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(n < 0 ? 0 : n > 8 ? 8 : n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE F load_n(const float* p, int64_t n) {
    return {_mm256_maskload_ps(p, first_lanes(n)), _mm256_maskload_ps(p + 8, first_lanes(n - 8))};
}
INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
INLINE void store_n(float* p, F x, int64_t n) {
    _mm256_maskstore_ps(p, first_lanes(n), x.a);
    _mm256_maskstore_ps(p + 8, first_lanes(n - 8), x.b);
}
INLINE F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE F abs(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
INLINE F round(F x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
INLINE __m256 power2(__m256 n) {  // 2^n for whole n in [-126, 127]
    __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
INLINE F scale2(F x, F n) { return {_mm256_mul_ps(x.a, power2(n.a)), _mm256_mul_ps(x.b, power2(n.b))}; }
INLINE float sum(F x) {
    __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}
INLINE float top(F x) {
    __m256 s = _mm256_max_ps(x.a, x.b);
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
}
INLINE F or_zero(F x, F least, F then) {
    return {_mm256_and_ps(_mm256_cmp_ps(x.a, least.a, _CMP_GE_OQ), then.a),
            _mm256_and_ps(_mm256_cmp_ps(x.b, least.b, _CMP_GE_OQ), then.b)};
}
INLINE F within(F x, F y, int64_t low, int64_t high) {
    __m256i ka = _mm256_andnot_si256(first_lanes(low), first_lanes(high));
    __m256i kb = _mm256_andnot_si256(first_lanes(low - 8), first_lanes(high - 8));
    return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(ka)), _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(kb))};
}

INLINE I izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE I iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
INLINE I operator+(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
INLINE int32_t isum(I x) {
    int32_t v[8];
    _mm256_storeu_si256((__m256i*)v, _mm256_add_epi32(x.a, x.b));
    return v[0] + v[1] + v[2] + v[3] + v[4] + v[5] + v[6] + v[7];
}
INLINE void store_bytes(int8_t* p, I x) {
    __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}

INLINE I load_bytes(const int8_t* p) {
    const __m128i x = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))};
}
INLINE __m256 e4m3(__m256i x) {
    const __m256i low = _mm256_slli_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0x7f)), 20);
    __m256 v = _mm256_castsi256_ps(_mm256_add_epi32(low, _mm256_set1_epi32(120 << 23)));
    v = _mm256_min_ps(v, _mm256_fmadd_ps(v, _mm256_set1_ps(2.0f), _mm256_set1_ps(-0x1p-6f)));
    return _mm256_or_ps(v, _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0x80000000))));
}
INLINE F load_e4m3(const uint8_t* p) {
    const I x = load_bytes((const int8_t*)p);
    return {e4m3(x.a), e4m3(x.b)};
}

INLINE __m256i float16_of(__m256i x) {
    return _mm256_and_si256(_mm256_srai_epi16(x, 1), _mm256_set1_epi16((short)0xbf80));
}
INLINE P low_e4m3(P x) { return {float16_of(_mm256_slli_epi16(x.a, 8)), float16_of(_mm256_slli_epi16(x.b, 8))}; }
INLINE P high_e4m3(P x) { return {float16_of(x.a), float16_of(x.b)}; }
INLINE F from_float16(__m256i x) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
INLINE void widen_float16(P x, F& first, F& last) { first = from_float16(x.a), last = from_float16(x.b); }
INLINE F load_twice(const float* p) {
    const __m256 x = _mm256_loadu_ps(p);
    return {_mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
            _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7))};
}
INLINE __m256i e2m1_half(__m256i x) {  // of each word, the code in the lowest bits
    const __m256i low = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0, (char)0x80, (char)0xc0, 0, 0x40, (char)0x80, (char)0xc0, 0, 0, (char)0x80, (char)0xc0, 0,
                      0x40, (char)0x80, (char)0xc0));
    const __m256i high = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, (char)0x80, (char)0xbf, (char)0xbf, (char)0xbf,
                      (char)0xc0, (char)0xc0, (char)0xc0, (char)0xc0));
    const __m256i code = _mm256_and_si256(x, _mm256_set1_epi16(15));
    return _mm256_or_si256(_mm256_shuffle_epi8(low, code), _mm256_slli_epi16(_mm256_shuffle_epi8(high, code), 8));
}
template <int N>
INLINE P e2m1(P x) {
    return {e2m1_half(_mm256_srli_epi16(x.a, 4 * N)), e2m1_half(_mm256_srli_epi16(x.b, 4 * N))};
}
INLINE __m256i exponents_twice(__m256i x) {
    const __m256i e = _mm256_and_si256(_mm256_slli_epi32(x, 7), _mm256_set1_epi32(0xffff));
    return _mm256_or_si256(e, _mm256_slli_epi32(e, 16));
}
INLINE P load_exponents(const int8_t* p) {
    const I x = load_bytes(p);
    return {exponents_twice(x.a), exponents_twice(x.b)};
}
INLINE __m256i scale_one_half(__m256i x, __m256i e) {
    const __m256i none = _mm256_cmpeq_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7fff)), _mm256_setzero_si256());
    return _mm256_add_epi16(x, _mm256_andnot_si256(none, e));
}
INLINE P scale_half(P x, P e) { return {scale_one_half(x.a, e.a), scale_one_half(x.b, e.b)}; }

INLINE P pairs(const void* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
INLINE P pairs_n(const bf16* p, int64_t n) {
    alignas(32) bf16 whole[32] = {};
    memcpy(whole, p, (size_t)(n < 32 ? n : 32) * 2);
    return pairs(whole);
}
INLINE P pzero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE __m256i low_half(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
INLINE P low_bits(P x) { return {low_half(x.a), low_half(x.b)}; }
INLINE P high_bits(P x) { return {low_half(_mm256_srli_epi16(x.a, 4)), low_half(_mm256_srli_epi16(x.b, 4))}; }
INLINE P spread(const void* p) {
    int32_t x;
    memcpy(&x, p, 4);
    return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
INLINE void store_pairs(void* p, P x) {
    _mm256_storeu_si256((__m256i*)p, x.a);
    _mm256_storeu_si256((__m256i*)p + 1, x.b);
}
INLINE __m256 wide(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
INLINE F load_half(const bf16* p) {
    return {wide(_mm_loadu_si128((const __m128i*)p)), wide(_mm_loadu_si128((const __m128i*)p + 1))};
}
INLINE F load_half_n(const bf16* p, int64_t n) {
    alignas(16) bf16 whole[16] = {};
    memcpy(whole, p, (size_t)(n < 16 ? n : 16) * 2);
    return load_half(whole);
}
INLINE __m128i halves(__m256 x) {  // to nearest, ties to even; NaN stays NaN
    __m256i u = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(nan));
    r = _mm256_srli_epi32(r, 16);
    r = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0xd8);
    return _mm256_castsi256_si128(r);
}
INLINE void store_half(bf16* p, F x) {
    _mm_storeu_si128((__m128i*)p, halves(x.a));
    _mm_storeu_si128((__m128i*)p + 1, halves(x.b));
}
INLINE P join_halves(F x, F y) {
    return {_mm256_set_m128i(halves(x.b), halves(x.a)), _mm256_set_m128i(halves(y.b), halves(y.a))};
}
INLINE void store_half_n(bf16* p, F x, int64_t n) {
    alignas(16) bf16 whole[16];
    store_half(whole, x);
    memcpy(p, whole, (size_t)(n < 0 ? 0 : n < 16 ? n : 16) * 2);
}

INLINE __m256 dot2_half(__m256 acc, __m256i x, __m256i y) {
    const __m256i high = _mm256_set1_epi32((int)0xffff0000);
    acc = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(y, 16)),
                          acc);
    return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(x, high)),
                           _mm256_castsi256_ps(_mm256_and_si256(y, high)), acc);
}
INLINE F dot2(F acc, P x, P y) { return {dot2_half(acc.a, x.a, y.a), dot2_half(acc.b, x.b, y.b)}; }
INLINE __m256i dot4_half(__m256i acc, __m256i x, __m256i y) {
    const __m256i low = _mm256_set1_epi16(0xff);
    __m256i even = _mm256_madd_epi16(_mm256_and_si256(x, low), _mm256_srai_epi16(_mm256_slli_epi16(y, 8), 8));
    __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(x, 8), _mm256_srai_epi16(y, 8));
    return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
INLINE I dot4(I acc, P x, P y) { return {dot4_half(acc.a, x.a, y.a), dot4_half(acc.b, x.b, y.b)}; }

INLINE void zip_half(__m256i x, __m256i y, P& out) {
    __m256i l = _mm256_unpacklo_epi16(x, y), h = _mm256_unpackhi_epi16(x, y);
    out = {_mm256_permute2x128_si256(l, h, 0x20), _mm256_permute2x128_si256(l, h, 0x31)};
}
INLINE void zip(P x, P y, P& first, P& last) {
    P f, l;
    zip_half(x.a, y.a, f);
    zip_half(x.b, y.b, l);
    first = f;
    last = l;
}

template <class Op>
INLINE F fold_four(const F* r, Op op) {
    F s[4];
    for (int i = 0; i < 4; i++) s[i] = op(r[i], F{r[i].b, r[i].a});  // only the first half is used, here and below
    const auto pair = [&](F x, F y) {
        return op(F{_mm256_unpacklo_ps(x.a, y.a), y.b}, F{_mm256_unpackhi_ps(x.a, y.a), y.b});
    };
    F x = pair(s[0], s[1]), y = pair(s[2], s[3]);
    return op(F{_mm256_shuffle_ps(x.a, y.a, 0x44), y.b}, F{_mm256_shuffle_ps(x.a, y.a, 0xee), y.b});
}
template <class Op>
INLINE F fold_sixteen(const F* c, Op op) {
    const auto join = [&](int half) {
        return F{half ? _mm256_permute2f128_ps(c[0].a, c[1].a, 0x31) : _mm256_permute2f128_ps(c[0].a, c[1].a, 0x20),
                 half ? _mm256_permute2f128_ps(c[2].a, c[3].a, 0x31) : _mm256_permute2f128_ps(c[2].a, c[3].a, 0x20)};
    };
    return op(join(0), join(1));
}

INLINE void transpose(P (&x)[16]) {
    int32_t in[16][16], out[16][16];
    for (int i = 0; i < 16; i++) store_pairs(in[i], x[i]);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) out[j][i] = in[i][j];
    for (int i = 0; i < 16; i++) x[i] = pairs(out[i]);
}
