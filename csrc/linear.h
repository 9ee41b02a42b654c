// Linear layers on packed weights, and preparation of their inputs. Included by level.cpp only.
#pragma once

// Prepares rows [first, last) of x, normalised if `norm` is not null, as product inputs.
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

// Normalises rows [first, last) to bf16 [rows][columns].
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

// The epilogue of a tile's products, float [rows][32] at `from`: rows [row, row + rows) of `block`. A gated product has
// 16 columns of gate and 16 of up; with `pair` the products of the next block are in `second`.
struct Rest {
    const Weights& w;
    const Output& o;
    const bool pair;
    float *from = nullptr, *second = nullptr;
    int64_t block = 0, row = 0, rows = 0;

    void finish(int64_t most) {
        const int64_t n = most < rows ? most : rows;
        if (o.changes) change(n);
        if (o.store == Store::gated) gate(n);
        else if (o.store == Store::add) put<true>(n);
        else put<false>(n);
        from += n * BLOCK, second += n * BLOCK, row += n, rows -= n;
    }

  private:
    void change(int64_t n) const {
        for (int64_t r = 0; r < n; r++) {
            if (o.places[row + r] < 0) continue;
            const float* more = o.changes + o.places[row + r] * o.change_width + block * BLOCK;
            for (int64_t c = 0; c < BLOCK; c += 16) {
                store(from + r * BLOCK + c, load(from + r * BLOCK + c) + load(more + c));
                if (pair) store(second + r * BLOCK + c, load(second + r * BLOCK + c) + load(more + BLOCK + c));
            }
        }
    }
    template <bool ADD>
    void put(int64_t n) const {
        const int64_t left = o.columns - block * BLOCK;
        const float* a = from;
        float* to = o.to + row * o.stride + block * BLOCK;
        for (int64_t r = 0; r < n; r++, a += BLOCK, to += o.stride)
            for (int64_t c = 0; c < 32 && c < left; c += 16) {
                F v = load(a + c);
                if (w.bias) v = v + load(w.bias + block * BLOCK + c);
                if (ADD) v = fma(v, set1(o.scale), load_n(to + c, left - c));
                store_n(to + c, v, left - c);
            }
    }
    template <Act ACT>
    F gated(const float* a, const float* bias) const {
        F g = load(a), u = load(a + 16);
        if (bias) g = g + load(bias), u = u + load(bias + 16);
        if constexpr (ACT == Act::silu) return silu(g) * u;
        if constexpr (ACT == Act::gelu_tanh) return gelu_tanh(g) * u;
        const F limit = set1(o.limit);
        g = min(g, limit), u = max(min(u, limit), zero() - limit);
        return g * sigmoid(g * set1(1.702f)) * (u + set1(1.0f));
    }
    void gate(int64_t n) const {
        if (o.act == Act::silu) gate_by<Act::silu>(n);
        else if (o.act == Act::gelu_tanh) gate_by<Act::gelu_tanh>(n);
        else gate_by<Act::gpt_oss>(n);
    }
    template <Act ACT>
    void gate_by(int64_t n) const {
        const float* bias = w.bias ? w.bias + block * BLOCK : nullptr;
        for (int64_t r = 0; r < n; r++) {
            const F made = gated<ACT>(from + r * BLOCK, bias);
            if (!pair) store_half(o.next.half + (row + r) * o.next.k + block * 16, made);
            else {
                const F more = gated<ACT>(second + r * BLOCK, bias ? bias + BLOCK : bias);
                put_block(o.next, row + r, block * 16, made, more);
            }
        }
    }
};

// Prefetches the output lines of a tile for writing, because they are in no near cache and stores would stall.
struct Fetch {
    const Output& o;
    int64_t block = 0, row = 0, rows = 0;

    void go(int64_t most) {
        const int64_t end = row + (most < rows ? most : rows);
        for (rows -= end - row; row < end; row++) {
            if (o.store != Store::gated) {
                const float* to = o.to + row * o.stride + block * BLOCK;
                __builtin_prefetch(to, 1);
                __builtin_prefetch(to + 16, 1);
            } else if (o.next.format == Format::bf16) {
                __builtin_prefetch(o.next.half + row * o.next.k + block * 16, 1);
            } else {
                __builtin_prefetch(o.next.quarter + row * o.next.k + block * 16, 1);
            }
        }
    }
};

// Work done in each step of a tile's product: the epilogue of the previous tile, and the output prefetch of this tile.
struct Beside {
    Rest rest;
    Fetch fetch;
    int64_t each_rest, each_fetch;

    void step() {
        fetch.go(each_fetch);
        rest.finish(each_rest);
    }
};

static void linear(const Weights& w, const Operand& x, int64_t rows, int64_t first, int64_t last, const Output& o,
                   const Soon& soon, uint8_t* scratch) {
    alignas(64) float room[2][2][(TILE_ROWS + ROOM_ROWS) * BLOCK];
    const Multiplier multiplier(input_format(w.format), rows);
    const bool unpacks = is_unpacked(w.format);
    const Weights unpacked{Format::bf16, 2, w.k, scratch, nullptr, nullptr, 0, false};
    const Weights& from = unpacks ? unpacked : w;
    const bool gated = o.store == Store::gated, pair = gated && !multiplier.tiles;
    const int64_t bytes = block_bytes(w), wide = pair ? 2 : 1, most = multiplier.most;
    if (gated) first *= 2, last *= 2;
    int64_t pass = ROW_BYTES / (x.format == Format::bf16 ? w.k * 2 : w.k) / most * most;
    if (pass < most) pass = most;
    const bool overlaps = multiplier.tiles && gated;  // only a gated epilogue has enough work
    const int64_t each = (most - 1) / (w.k / BLOCK) + 1;
    Beside beside{{w, o, pair}, {o}, overlaps ? each : 0, each};
    Rest& rest = beside.rest;
    for (int64_t begin = 0, turn = 0; begin < rows; begin += pass) {
        const int64_t now = rows - begin < pass ? rows - begin : pass;
        for (int64_t block = first; block < last; block += wide) {
            const bool direct = multiplier.tiles && o.store == Store::write && !w.bias && !o.changes &&
                                (block + 1) * BLOCK <= o.columns;
            // Memory read after this block or pair of blocks: the next block, the first block again, or `soon`.
            const uint8_t *here = w.data + block * bytes, *next = here + wide * bytes;
            if (block + wide == last) next = begin + pass < rows ? w.data + first * bytes : soon.at;
            else if (now <= FOUND_ROWS) next = nullptr;
            const uint8_t* read_next = next;
            if (unpacks) next = nullptr;
            const bool in_parts = unpacks && multiplier.in_parts(now);
            for (int64_t i = 0; unpacks && !in_parts && i < wide; i++)
                unpack(w, block + i, 0, w.k, (bf16*)scratch + i * w.k * BLOCK,
                       read_next ? read_next + i * bytes : nullptr);
            const int64_t at_block = unpacks ? 0 : block;
            by_tiles(now, most, !multiplier.tiles, [&](int64_t at, int64_t count, int64_t left) {
                const int64_t row = begin + at;
                const int64_t tiles = (now + most - 1) / most;
                const Ask ask = next ? multiplier.ask(from, tiles, left, (intptr_t)next - (intptr_t)here) : Ask{0, 0};
                beside.fetch.block = block, beside.fetch.row = row, beside.fetch.rows = count;
                if (!multiplier.tiles) beside.fetch.go(count);
                const auto times = [&](float* to, int64_t stride) {
                    if (in_parts)
                        multiplier.times_parts(w, block, x, row, count, (bf16*)scratch, read_next, to, stride, beside);
                    else multiplier.times(from, at_block, x, row, count, ask, to, stride, beside);
                };
                if (direct) {
                    times(o.to + row * o.stride + block * BLOCK, o.stride);
                    return;
                }
                turn ^= 1;
                float *made = room[turn][0] + TILE_ROWS * BLOCK, *second = room[turn][1] + TILE_ROWS * BLOCK;
                times(made, BLOCK);
                if (pair) multiplier.times(from, at_block + 1, x, row, count, ask, second, BLOCK, beside);
                rest.finish(rest.rows);
                rest.from = made, rest.second = second, rest.block = block, rest.row = row, rest.rows = count;
                if (!overlaps) rest.finish(count);
            });
        }
    }
    rest.finish(rest.rows);
}
