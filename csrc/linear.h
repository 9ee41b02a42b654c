// Linear layers on packed weights, and what makes their inputs. Included by level.cpp only.
#pragma once

constexpr int64_t ROW_BYTES = 256 << 10;  // rows of one pass over the weights: they stay in the second-level cache

// Rows [first, last) of x, normalised when there is a norm, as inputs of products.
static void prepare(const float* x, int64_t stride, int64_t columns, const float* norm, float eps, const Operand& out,
                    int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
        const float* row = x + i * stride;
        F factor = set1(norm ? inverse_rms(row, columns, eps) : 1.0f);
        for (int64_t c = 0; c < out.k; c += BLOCK) {
            F a = load_n(row + c, columns - c), b = columns - c > 16 ? load_n(row + c + 16, columns - c - 16) : zero();
            if (norm) {
                a = a * factor * load_n(norm + c, columns - c);
                if (columns - c > 16) b = b * factor * load_n(norm + c + 16, columns - c - 16);
            }
            put_block(out, i, c, a, b);
        }
    }
}

// Rows [first, last) normalised, as bf16 [rows][columns].
static void norm_rows(const float* x, int64_t columns, const float* weight, float eps, bf16* out, int64_t first,
                      int64_t last) {
    for (int64_t i = first; i < last; i++) {
        const float* row = x + i * columns;
        F factor = set1(inverse_rms(row, columns, eps));
        for (int64_t c = 0; c < columns; c += 16)
            store_half_n(out + i * columns + c, load_n(row + c, columns - c) * factor * load_n(weight + c, columns - c),
                         columns - c);
    }
}

// What a tile asks for while it computes: so many lines for each two that it reads, from so many bytes behind its block.
struct Ask {
    int lines;
    int64_t bytes;
};

// As many bytes as a block has, from so many behind it on, while the last two tiles of rows, or the only one, are
// multiplied with it: memory is to be busy all the while.
INLINE Ask ask_by(const Weights& w, int64_t tiles, int64_t left, int64_t from) {
    if (tiles == 1) return {2, from};
    if (left > 2) return {0, 0};
    return {1, left == 2 ? from : from + block_bytes(w) / 2};
}

// One tile: `count` rows times `block`, float [count][32], bias included.
INLINE void product(const Weights& w, const Operand& x, int64_t block, int64_t row, int64_t count, const Ask& ask,
                    float* out) {
    if (w.format == Format::bf16) {
        const bf16* at = (const bf16*)w.data + block * w.k * BLOCK;
        TILES.half[ask.lines][count](at, w.k, x.half + row * w.k, w.k, out, BLOCK, ask.bytes / 2);
    } else {
        const uint8_t* at = w.data + block * w.k * BLOCK;
        TILES.quarter[ask.lines][count](at, w.scale + block * BLOCK, w.k, x, row, out, ask.bytes);
    }
    if (!w.bias) return;
    F b0 = load(w.bias + block * BLOCK), b1 = load(w.bias + block * BLOCK + 16);
    for (int64_t r = 0; r < count; r++, out += BLOCK) {
        store(out, load(out) + b0);
        store(out + 16, load(out + 16) + b1);
    }
}

// Brings in the lines that a tile will write: they are in no near cache, and would be waited for.
INLINE void fetch(const Output& o, int64_t row, int64_t count, int64_t block) {
    for (int64_t r = row; r < row + count; r++) {
        if (o.store != Store::swiglu) {
            const float* to = o.to + r * o.stride + block * BLOCK;
            __builtin_prefetch(to, 1);
            __builtin_prefetch(to + 16, 1);
        } else if (o.next.format == Format::bf16) {
            __builtin_prefetch(o.next.half + r * o.next.k + block * BLOCK, 1);
        } else {
            __builtin_prefetch(o.next.quarter + r * o.next.k + block * BLOCK, 1);
        }
    }
}

INLINE void put(const Output& o, int64_t row, int64_t count, int64_t block, const float* from) {
    const int64_t left = o.columns - block * BLOCK;
    for (int64_t r = 0; r < count; r++, from += BLOCK) {
        float* to = o.to + (row + r) * o.stride + block * BLOCK;
        for (int64_t c = 0; c < 32 && c < left; c += 16) {
            F v = load(from + c);
            if (o.store == Store::add) v = v + load_n(to + c, left - c);
            store_n(to + c, v, left - c);
        }
    }
}

static void linear(const Weights& w, const Operand& x, int64_t rows, int64_t first, int64_t last, const Output& o,
                   const Soon& soon) {
    alignas(64) float a[MAX_ROWS * BLOCK], b[MAX_ROWS * BLOCK];
    const bool half = w.format == Format::bf16;
    const int64_t bytes = block_bytes(w), wide = o.store == Store::swiglu ? 2 : 1;
    const int most = half ? MAX_ROWS : MAX_QUARTER_ROWS;
    int64_t pass = ROW_BYTES / (half ? w.k * 2 : w.k) / most * most;
    if (pass < most) pass = most;
    for (int64_t begin = 0; begin < rows; begin += pass) {
        const int64_t now = rows - begin < pass ? rows - begin : pass;
        for (int64_t block = first; block < last; block++) {
            // What is read behind this block, of which a pair counts as one: the next, the first again, or `soon`.
            const uint8_t *here = w.data + wide * block * bytes, *next = here + wide * bytes;
            if (block + 1 == last) next = begin + pass < rows ? w.data + wide * first * bytes : soon.at;
            else if (now <= FOUND_ROWS) next = nullptr;
            by_tiles(now, most, [&](int64_t at, int64_t count, int64_t left) {
                const int64_t row = begin + at;
                const Ask ask = next ? ask_by(w, (now + most - 1) / most, left, (intptr_t)next - (intptr_t)here) : Ask{0, 0};
                fetch(o, row, count, block);
                if (o.store != Store::swiglu) {
                    product(w, x, block, row, count, ask, a);
                    put(o, row, count, block, a);
                    return;
                }
                product(w, x, 2 * block, row, count, ask, a);
                product(w, x, 2 * block + 1, row, count, ask, b);
                for (int64_t r = 0; r < count; r++) {
                    const float *g = a + r * BLOCK, *u = b + r * BLOCK;
                    put_block(o.next, row + r, block * BLOCK, silu(load(g)) * load(u), silu(load(g + 16)) * load(u + 16));
                }
            });
        }
    }
}
