// The innermost loops: a few rows times one block of 32 outputs. Included by level.cpp only. See amx.h for the AMX
// version.
//
// A tile of R rows keeps 2 R accumulators in registers; the weights of the block stream past them once. Each output is
// summed in the order of k, independent of R. A row's result has the same bits in any batch.
#pragma once

// a[r][0..32) = sum over k of x[r][k] * w[k][0..32); w is [k / 2][32][2], rows of x are x_stride apart. Prefetches
// LINES cache lines per two lines of weights, from `w + ahead` on.
template <int R, int LINES>
INLINE void dots(const bf16* w, int64_t k, const bf16* x, int64_t x_stride, int64_t ahead, F (&a)[R][2]) {
    for (auto& row : a) row[0] = row[1] = zero();
    for (int64_t q = 0; q < k; q += 2) {
        const bf16* at = w + q * 32;
        P w0 = pairs(at), w1 = pairs(at + 32);
#pragma GCC unroll 2
        for (int i = 0; i < LINES; i++) __builtin_prefetch(w + ahead + q / 2 * 32 * LINES + 32 * i, 0, NEAREST);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            P v = spread(x + r * x_stride + q);
            a[r][0] = dot2(a[r][0], v, w0);
            a[r][1] = dot2(a[r][1], v, w1);
        }
    }
}

// out[r] = a[r], rows out_stride apart.
template <int R, int LINES>
static void tile_half(const bf16* w, int64_t k, const bf16* x, int64_t x_stride, float* out, int64_t out_stride,
                      int64_t ahead) {
    F a[R][2];
    dots<R, LINES>(w, k, x, x_stride, ahead, a);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) store(out + r * out_stride + j * 16, a[r][j]);
}

// out[r] = keep[r] * out[r] + a[r].
template <int R>
static void tile_onto(const bf16* w, int64_t k, const bf16* x, int64_t x_stride, float* out, int64_t out_stride,
                      const float* keep) {
    F a[R][2];
    dots<R, 0>(w, k, x, x_stride, 0, a);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            float* to = out + r * out_stride + j * 16;
            store(to, fma(set1(keep[r]), load(to), a[r][j]));
        }
}

// The same for int8 weights, [k / 4][32][4] with 128 added, and rows in groups of 32 with a scale each.
template <int R, int LINES>
static void tile_quarter(const uint8_t* w, const float* scale, int64_t k, const Operand& x, int64_t row, float* out,
                         int64_t ahead) {
    const int64_t groups = k / BLOCK;
    const int8_t* q = x.quarter + row * k;
    F o[R][2];
    for (auto& r : o) r[0] = r[1] = zero();
    for (int64_t g = 0; g < groups; g++) {
        I a[R][2];
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) a[r][0] = a[r][1] = iset1(x.offset[(row + r) * groups + g]);
#pragma GCC unroll 8
        for (int u = 0; u < 8; u++) {
            const uint8_t* at = w + (g * 8 + u) * 128;
            P w0 = pairs(at), w1 = pairs(at + 64);
#pragma GCC unroll 2
            for (int i = 0; i < LINES; i++) __builtin_prefetch(w + ahead + (g * 8 + u) * 64 * LINES + 64 * i, 0, NEAREST);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                P v = spread(q + r * k + g * BLOCK + u * 4);
                a[r][0] = dot4(a[r][0], w0, v);
                a[r][1] = dot4(a[r][1], w1, v);
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            F s = set1(x.scale[(row + r) * groups + g]);
            o[r][0] = fma(s, to_float(a[r][0]), o[r][0]);
            o[r][1] = fma(s, to_float(a[r][1]), o[r][1]);
        }
    }
    F s0 = load(scale), s1 = load(scale + 16);
    for (int r = 0; r < R; r++) {
        store(out + r * BLOCK, o[r][0] * s0);
        store(out + r * BLOCK + 16, o[r][1] * s1);
    }
}

// Values of four inputs and 16 outputs, twice: those of the first and of the last 16 outputs of a block.
template <bool FOUR>
INLINE void values_of(const uint8_t* at, P& first, P& last) {
    if constexpr (FOUR) {
        const P both = pairs(at);
        first = low_bits(both), last = high_bits(both);
    } else {
        first = pairs(at), last = pairs(at + 64);
    }
}

// The same for weights with a scale per group of inputs, of 4 or 8 bits; see Weights. `scale` is the block's.
template <int R, int LINES, bool FOUR>
static void tile_grouped(const Weights& w, const uint8_t* data, const float* scale, const Operand& x, int64_t row,
                         float* out, int64_t ahead) {
    constexpr int64_t QUAD = FOUR ? 64 : 128;  // bytes of four inputs
    const int64_t k = w.k, groups = k / BLOCK, same = w.group / BLOCK, wide = w.mins ? 2 * BLOCK : BLOCK;
    const int8_t* q = x.quarter + row * k;
    F o[R][2];
    for (auto& r : o) r[0] = r[1] = zero();
    for (int64_t g = 0, left = same; g < groups; g++, left--) {
        if (left == 0) scale += wide, left = same;
        I a[R][2];
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const int32_t offset = w.mins ? 0 : x.offset[(row + r) * groups + g] / (FOUR ? 16 : 1);
            a[r][0] = a[r][1] = iset1(offset);
        }
#pragma GCC unroll 8
        for (int u = 0; u < 8; u++) {
            P w0, w1;
            values_of<FOUR>(data + (g * 8 + u) * QUAD, w0, w1);
            if (!FOUR || u % 2 == 0) {
                const int64_t line = FOUR ? (g * 8 + u) / 2 : g * 8 + u;
#pragma GCC unroll 2
                for (int i = 0; i < LINES; i++)
                    __builtin_prefetch(data + ahead + line * 64 * LINES + 64 * i, 0, NEAREST);
            }
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                P v = spread(q + r * k + g * BLOCK + u * 4);
                a[r][0] = dot4(a[r][0], w0, v);
                a[r][1] = dot4(a[r][1], w1, v);
            }
        }
        const F s0 = load(scale), s1 = load(scale + 16);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const F s = set1(x.scale[(row + r) * groups + g]);
            o[r][0] = fma(s * s0, to_float(a[r][0]), o[r][0]);
            o[r][1] = fma(s * s1, to_float(a[r][1]), o[r][1]);
        }
        if (w.mins) {
            const F m0 = load(scale + BLOCK), m1 = load(scale + BLOCK + 16);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                const int64_t at = (row + r) * groups + g;
                const F total = set1(x.scale[at] * (float)(x.offset[at] / -128));
                o[r][0] = fma(total, m0, o[r][0]);
                o[r][1] = fma(total, m1, o[r][1]);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        store(out + r * BLOCK, o[r][0]);
        store(out + r * BLOCK + 16, o[r][1]);
    }
}

// Prefetches of a product: `lines` per two cache lines of weights (with AMX, per 32), beginning `bytes` bytes after the
// start of its block.
struct Ask {
    int lines;
    int64_t bytes;
};

// Prefetches one block of bytes, beginning `from` bytes after the block's start, during the last two row tiles or the
// only one. This keeps memory busy. `left`: number of the `tiles` tiles left, including this one.
INLINE Ask ask_by_last(const Weights& w, int64_t tiles, int64_t left, int64_t from) {
    if (tiles == 1) return {2, from};
    if (left > 2) return {0, 0};
    return {1, left == 2 ? from : from + block_bytes(w) / 2};
}

constexpr int MAX_QUARTER_ROWS = MAX_ROWS < 6 ? MAX_ROWS : 6;  // integer and float accumulators share the registers

using TileHalf = void (*)(const bf16*, int64_t, const bf16*, int64_t, float*, int64_t, int64_t);
using TileOnto = void (*)(const bf16*, int64_t, const bf16*, int64_t, float*, int64_t, const float*);
using TileQuarter = void (*)(const uint8_t*, const float*, int64_t, const Operand&, int64_t, float*, int64_t);
using TileGrouped = void (*)(const Weights&, const uint8_t*, const float*, const Operand&, int64_t, float*, int64_t);

// Kernels by LINES and by number of rows.
struct TileTable {
    TileHalf half[3][MAX_ROWS + 1] = {};
    TileOnto onto[MAX_ROWS + 1] = {};
    TileQuarter quarter[3][MAX_QUARTER_ROWS + 1] = {};
    TileGrouped group4[3][MAX_QUARTER_ROWS + 1] = {}, group8[3][MAX_QUARTER_ROWS + 1] = {};
    constexpr TileTable() { fill<MAX_ROWS>(); }

    template <int R>
    constexpr void fill() {
        half[0][R] = tile_half<R, 0>, half[1][R] = tile_half<R, 1>, half[2][R] = tile_half<R, 2>;
        onto[R] = tile_onto<R>;
        if constexpr (R <= MAX_QUARTER_ROWS) {
            quarter[0][R] = tile_quarter<R, 0>, quarter[1][R] = tile_quarter<R, 1>, quarter[2][R] = tile_quarter<R, 2>;
            fill_grouped<R, 0>(), fill_grouped<R, 1>(), fill_grouped<R, 2>();
        }
        if constexpr (R > 1) fill<R - 1>();
    }
    template <int R, int LINES>
    constexpr void fill_grouped() {
        group4[LINES][R] = tile_grouped<R, LINES, true>, group8[LINES][R] = tile_grouped<R, LINES, false>;
    }
};
static constexpr TileTable TILES;

// A block's products of 8-bit inputs, rows [row, row + count).
INLINE void times_quarter(const Weights& w, int64_t block, const Operand& x, int64_t row, int64_t count, const Ask& ask,
                          float* out) {
    const uint8_t* at = w.data + block * block_bytes(w);
    const float* scale = w.scale + block * block_scales(w);
    if (w.format == Format::int8) TILES.quarter[ask.lines][count](at, scale, w.k, x, row, out, ask.bytes);
    else (w.format == Format::group4 ? TILES.group4 : TILES.group8)[ask.lines][count](w, at, scale, x, row, out, ask.bytes);
}

// Cuts `rows` into the fewest tiles of at most `most` rows, and calls f(row, count, tiles left including this one).
// `equal`: tiles of about equal size; otherwise full tiles except for the last.
template <class Call>
INLINE void by_tiles(int64_t rows, int64_t most, bool equal, Call&& f) {
    const int64_t tiles = (rows + most - 1) / most;
    for (int64_t i = 0; i < tiles; i++) {
        const int64_t first = equal ? rows * i / tiles : i * most;
        const int64_t end = i + 1 == tiles ? rows : equal ? rows * (i + 1) / tiles : first + most;
        f(first, end - first, tiles - i);
    }
}

#ifndef PDK_AMX
constexpr int64_t ROW_BYTES = 256 << 10;  // input rows per pass over the weights: the second-level cache holds them
constexpr int64_t ROOM_ROWS = MAX_ROWS;
constexpr int64_t TILE_KEYS = MOST_TILE_KEYS, MAX_QUERY_ROWS = MAX_ROWS;  // keys and queries of one product of extend

// Multiplies rows with weights of a format, at most `most` rows at a time. `tiles`: uses full tiles and overlaps other
// work with their products; otherwise parts of equal size.
struct Multiplier {
    const int64_t most;
    static constexpr bool tiles = false;

    Multiplier(Format format, int64_t) : most(format == Format::bf16 ? MAX_ROWS : MAX_QUARTER_ROWS) {}

    static Ask ask(const Weights& w, int64_t count, int64_t left, int64_t from) { return ask_by_last(w, count, left, from); }

    // Whether `count` rows are multiplied by `times_parts`.
    static constexpr bool in_parts(int64_t) { return false; }
    template <class Beside>
    void times_parts(const Weights&, int64_t, const Operand&, int64_t, int64_t, bf16*, const uint8_t*, float*, int64_t,
                     Beside&) const {}

    // out = rows [row, row + count) of x times a block: float [count][32], `stride` apart. Earlier rows may be written
    // again with the same values. In scratch, which has TILE_ROWS rows in front, they may be undefined.
    template <class Beside>
    void times(const Weights& w, int64_t block, const Operand& x, int64_t row, int64_t count, const Ask& ask, float* out,
               int64_t stride, Beside&) const {
        const uint8_t* at = w.data + block * block_bytes(w);
        if (w.format != Format::bf16) times_quarter(w, block, x, row, count, ask, out);
        else TILES.half[ask.lines][count]((const bf16*)at, w.k, x.half + row * w.k, w.k, out, stride, ask.bytes / 2);
    }
};

// The products of extend and of the delta rule, for tiles of a given maximum number of rows.
struct QueryMultiplier {
    static constexpr int64_t WIDE = BLOCK;  // columns of one product of `times`

    explicit QueryMultiplier(int64_t) {}

    // out[r] = (KEEPS: keep[r] * out[r] +) x[r], n rows, times WIDE columns of weights of `k` inputs, the first `used`
    // of them. With AMX fewer columns when `columns` are fewer, and `used` is a multiple of 32.
    template <bool KEEPS>
    void times(const bf16* w, int64_t, int64_t, int64_t used, const bf16* x, int64_t x_stride, int64_t n, float* out,
               int64_t out_stride, const float* keep) const {
        if (KEEPS) TILES.onto[n](w, used, x, x_stride, out, out_stride, keep);
        else TILES.half[0][n](w, used, x, x_stride, out, out_stride, 0);
    }

    // scores [n][TILE_KEYS] of queries [n][wide] with the first `seen` keys of a tile.
    void score(const bf16* keys, int64_t wide, int64_t seen, const bf16* q, int64_t n, float* scores) const {
        for (int64_t k = 0; k < seen; k += BLOCK) TILES.half[0][n](keys + k * wide, wide, q, wide, scores + k, TILE_KEYS, 0);
    }
    // out[r] = keep[r] * out[r] + weights[r] [TILE_KEYS] times the first `seen` of `count` values [wide].
    void mix(const bf16* values, int64_t count, int64_t seen, const bf16* weights, int64_t n, float* out, int64_t wide,
             const float* keep) const {
        for (int64_t c = 0; c < wide; c += BLOCK)
            TILES.onto[n](values + c * count, seen, weights, TILE_KEYS, out + c, wide, keep);
    }
};
#endif
