// Blocks of FP8 and MXFP4 weights, unpacked to the layout of bf16. Included by level.cpp only. kernels.h has both
// formats.
//
// A block is unpacked once for all rows of a pass: whole, or with AMX and few rows a part at a time. It has the bits of
// the dequantized weight in bf16, so a product has the bits of one with bf16 weights.
#pragma once

constexpr float E4M3_UNIT = 256.0f;  // low_e4m3 and high_e4m3 give values that are smaller by this

// Prefetches the cache line `bytes` bytes after `next`, if there is a `next`.
INLINE void fetch_next(const uint8_t* next, int64_t bytes) {
    if (next) __builtin_prefetch(next + bytes, 0, NEAREST);
}

// Stores 32 codes of 16 outputs, as float16, as weights.
INLINE void put_scaled(bf16* to, P codes, F first_scale, F last_scale) {
    F first, last;
    widen_float16(codes, first, last);
    store_pairs(to, join_halves(first * first_scale, last * last_scale));
}

static void unpack_fp8(const Weights& w, int64_t block, int64_t first, int64_t last, bf16* to, const uint8_t* next) {
    const uint8_t* at = w.data + block * block_bytes(w) + first * BLOCK;
    const float* scale = w.scale + block * block_scales(w);
    scale += first / w.group * BLOCK;
    F s[4];
    for (int64_t q = first, left = 0; q < last; q += 4, at += 128, to += 128, left -= 4) {
        if (left == 0) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) s[i] = load_twice(scale + 8 * i) * set1(E4M3_UNIT);
            scale += BLOCK, left = q == first ? w.group - first % w.group : w.group;
        }
        fetch_next(next, q * BLOCK), fetch_next(next, q * BLOCK + 64);
        const P x = pairs(at), y = pairs(at + 64);
        put_scaled(to, low_e4m3(x), s[0], s[1]);
        put_scaled(to + 32, low_e4m3(y), s[2], s[3]);
        put_scaled(to + 64, high_e4m3(x), s[0], s[1]);
        put_scaled(to + 96, high_e4m3(y), s[2], s[3]);
    }
}

static void unpack_mxfp4(const Weights& w, int64_t block, int64_t first, int64_t last, bf16* to, const uint8_t* next) {
    const uint8_t* at = w.data + block * block_bytes(w) + first / BLOCK * MXFP4_BYTES;
    for (int64_t q = first; q < last; q += BLOCK, at += MXFP4_BYTES, to += BLOCK * BLOCK) {
        const P e[2] = {load_exponents((const int8_t*)at), load_exponents((const int8_t*)at + 16)};
        for (int64_t line = 0; line <= MXFP4_BYTES; line += 64) fetch_next(next, q / BLOCK * MXFP4_BYTES + line);
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++)
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                const P x = pairs(at + BLOCK + (2 * g + h) * 64);
                bf16* line = to + g * 256 + h * 32;
                store_pairs(line, scale_half(e2m1<0>(x), e[h]));
                store_pairs(line + 64, scale_half(e2m1<1>(x), e[h]));
                store_pairs(line + 128, scale_half(e2m1<2>(x), e[h]));
                store_pairs(line + 192, scale_half(e2m1<3>(x), e[h]));
            }
    }
}

// Unpacks inputs [first, last), multiples of 32, of a block to bf16 [inputs / 2][32][2]. Prefetches the same inputs of
// the block at `next` unless that is null.
static void unpack(const Weights& w, int64_t block, int64_t first, int64_t last, bf16* to, const uint8_t* next) {
    (w.format == Format::fp8 ? unpack_fp8 : unpack_mxfp4)(w, block, first, last, to, next);
}
