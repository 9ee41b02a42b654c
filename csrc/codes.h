// Rows of keys and values as 8-bit codes: see KVFormat. Attention converts a run of sixteen tokens to bf16 when it
// locates them, so that all products are those of bf16 pages. See level.cpp.
#pragma once

constexpr float MAX_E4M3 = 448.0f;

// The nearest code of FP8 E4M3, ties to even; magnitudes above 448 become 448.
INLINE uint8_t to_e4m3(float x) {
    uint32_t bits, size;
    memcpy(&bits, &x, 4);
    float m = fabsf(x);
    m = m < MAX_E4M3 ? m : MAX_E4M3;
    memcpy(&size, &m, 4);
    const uint32_t fine = (uint32_t)(int32_t)(((m + 0x1p14f) - 0x1p14f) * 512.0f);  // below 2^-6: multiples of 2^-9
    const uint32_t coarse = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    return (uint8_t)((bits >> 24 & 0x80) | (m < 0x1p-6f ? fine : coarse));
}

// Stores `dim` values as codes. A row is written whole, with one copy.
INLINE void store_codes(const float* x, int64_t dim, KVFormat format, bf16* to) {
    if (format == KVFormat::fp8_e4m3) {
        uint8_t* codes = (uint8_t*)to;
        for (int64_t d = 0; d < dim; d++) codes[d] = to_e4m3(x[d]);
        return;
    }
    alignas(64) int8_t row[MAX_DIM + 16];
    F most_lanes = zero();
    for (int64_t d = 0; d < dim; d += 16) most_lanes = max(most_lanes, abs(load_n(x + d, dim - d)));
    const float most = top(most_lanes), scale = most / 127.0f;
    const F inverse = set1(127.0f / (most > 1e-30f ? most : 1e-30f));
    for (int64_t d = 0; d < dim; d += 16) store_bytes(row + d, to_int(load_n(x + d, dim - d) * inverse));
    const int64_t end = (dim + 3) / 4 * 4;
    memcpy(row + end, &scale, 4);
    memcpy(to, row, end + 4);
}

// Converts a row of codes to bf16.
INLINE void load_codes(const bf16* from, int64_t dim, KVFormat format, bf16* to) {
    const uint8_t* codes = (const uint8_t*)from;
    const int64_t whole = dim / 16 * 16, rest = dim - whole;
    alignas(16) uint8_t last[16] = {};  // the pool may end with the row
    if (rest) memcpy(last, codes + whole, rest);
    if (format == KVFormat::fp8_e4m3) {
        for (int64_t d = 0; d < whole; d += 16) store_half(to + d, load_e4m3(codes + d));
        if (rest) store_half_n(to + whole, load_e4m3(last), rest);
        return;
    }
    float one;
    memcpy(&one, codes + (dim + 3) / 4 * 4, 4);
    const F scale = set1(one);
    for (int64_t d = 0; d < whole; d += 16) store_half(to + d, to_float(load_bytes((const int8_t*)codes + d)) * scale);
    if (rest) store_half_n(to + whole, to_float(load_bytes((const int8_t*)last)) * scale, rest);
}
