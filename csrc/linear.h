// Linear layers on packed weights, and what makes their inputs. Included by level.cpp only.
#pragma once

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

// Products of a tile, float [rows][32] at `a`, or of gate and up at `a` and `b`, and what is still to be done with them.
struct Rest {
    const Weights& w;
    const Output& o;
    const float *a = nullptr, *b = nullptr;
    int64_t block = 0, row = 0, rows = 0;
    int64_t each = 0;  // rows that are done while a step of the next tile is multiplied

    void finish(int64_t most) {
        const int64_t n = most < rows ? most : rows;
        if (o.store == Store::swiglu) gate(n);
        else if (o.store == Store::add) put<true>(n);
        else put<false>(n);
        a += n * BLOCK, b += n * BLOCK, row += n, rows -= n;
    }
    void finish() { finish(rows); }

  private:
    template <bool ADD>
    void put(int64_t n) const {
        const int64_t left = o.columns - block * BLOCK;
        const float* from = a;
        float* to = o.to + row * o.stride + block * BLOCK;
        for (int64_t r = 0; r < n; r++, from += BLOCK, to += o.stride)
            for (int64_t c = 0; c < 32 && c < left; c += 16) {
                F v = load(from + c);
                if (w.bias) v = v + load(w.bias + block * BLOCK + c);
                if (ADD) v = v + load_n(to + c, left - c);
                store_n(to + c, v, left - c);
            }
    }
    void gate(int64_t n) const {
        const float* bias = w.bias ? w.bias + 2 * block * BLOCK : nullptr;
        for (int64_t r = 0; r < n; r++) {
            F made[2];
            for (int64_t i = 0; i < 2; i++) {
                F g = load(a + r * BLOCK + 16 * i), u = load(b + r * BLOCK + 16 * i);
                if (bias) g = g + load(bias + 16 * i), u = u + load(bias + BLOCK + 16 * i);
                made[i] = silu(g) * u;
            }
            put_block(o.next, row + r, block * BLOCK, made[0], made[1]);
        }
    }
};

static void linear(const Weights& w, const Operand& x, int64_t rows, int64_t first, int64_t last, const Output& o,
                   const Soon& soon) {
    alignas(64) float room[2][2][ROOM_ROWS * BLOCK];
    const Multiplier multiplier(w.format, rows);
    const int64_t bytes = block_bytes(w), wide = o.store == Store::swiglu ? 2 : 1, most = multiplier.most;
    int64_t pass = ROW_BYTES / (w.format == Format::bf16 ? w.k * 2 : w.k) / most * most;
    if (pass < most) pass = most;
    Rest rest{w, o};
    const bool overlaps = multiplier.overlaps && wide == 2;  // there is enough to do
    if (overlaps) rest.each = (most - 1) / (wide * w.k / BLOCK) + 1;
    for (int64_t begin = 0, turn = 0; begin < rows; begin += pass) {
        const int64_t now = rows - begin < pass ? rows - begin : pass;
        for (int64_t block = first; block < last; block++) {
            // What is read behind this block, of which a pair counts as one: the next, the first again, or `soon`.
            const uint8_t *here = w.data + wide * block * bytes, *next = here + wide * bytes;
            if (block + 1 == last) next = begin + pass < rows ? w.data + wide * first * bytes : soon.at;
            else if (now <= FOUND_ROWS) next = nullptr;
            by_tiles(now, most, multiplier.equal, [&](int64_t at, int64_t count, int64_t left) {
                const int64_t row = begin + at;
                const int64_t tiles = (now + most - 1) / most;
                const Ask ask = next ? multiplier.ask(w, tiles, left, (intptr_t)next - (intptr_t)here) : Ask{0, 0};
                fetch(o, row, count, block);
                turn ^= 1;
                const float* made[2];
                for (int64_t i = 0; i < wide; i++)
                    made[i] = multiplier.times(w, wide * block + i, x, row, count, ask, room[turn][i], rest);
                rest.finish();
                rest.a = made[0], rest.b = made[wide - 1], rest.block = block, rest.row = row, rest.rows = count;
                if (!overlaps) rest.finish();
            });
        }
    }
    rest.finish();
}
