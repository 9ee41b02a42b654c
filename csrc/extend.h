// Attention of many queries of one row over its pages: chunks of prompts. See level.cpp.
//
// Queries of one KV head, token by token and its heads beside each other, are the rows of two products: with the keys of
// a tile, rearranged from their pages as weights of a linear layer are, and of what softmax makes of that with its
// values. The softmax goes on from one tile to the next (arXiv:2205.14135). Tiles lie at multiples of TILE_KEYS: a query's
// result has the same bits whatever chunk it is computed in.
#pragma once

struct Scratch {
    bf16 *keys, *values, *weights;
    float *scores, *out, *most, *total;
};

INLINE Scratch carve(uint8_t* at, int64_t rows, int64_t wide) {
    Scratch s;
    auto take = [&](int64_t bytes) {
        uint8_t* p = at;
        at += (bytes + 63) / 64 * 64;
        return p;
    };
    s.keys = (bf16*)take(TILE_KEYS * wide * 2);
    s.values = (bf16*)take(TILE_KEYS * wide * 2);
    s.weights = (bf16*)take(rows * TILE_KEYS * 2);
    s.scores = (float*)take(rows * TILE_KEYS * 4);
    s.out = (float*)take(rows * wide * 4);
    s.most = (float*)take(rows * 4);
    s.total = (float*)take(rows * 4);
    return s;
}

// Tokens [t, t + count) of the row as weights: keys [count / 32][wide / 2][32][2], values [wide / 32][count / 2][32][2].
INLINE void pack(const Attention& a, const Piece& p, int64_t t, int64_t count, const Scratch& s) {
    const int64_t dim = a.pages.dim, wide = padded(dim);
    alignas(64) bf16 room[RUN_ROOM];
    for (int64_t g = 0; g < count; g += RUN) {
        const Run run = find(a, p, p.head, t + g, room);
        for (int64_t c = 0; c < dim; c += 32) {
            const int64_t n = dim - c;
            P x[16];
            const bf16 *keys = run.keys + c, *values = run.values + c;
            for (int i = 0; i < 16; i++) x[i] = n >= 32 ? pairs(keys + i * dim) : pairs_n(keys + i * dim, n);
            transpose(x);
            bf16* to = s.keys + (g / 32 * (wide / 2) + c / 2) * 64 + g % 32 * 2;
            for (int j = 0; j < 16; j++) store_pairs(to + j * 64, x[j]);
            bf16* out = s.values + (c / 32 * (count / 2) + g / 2) * 64;
            for (int i = 0; i < 16; i += 2) {
                const bf16 *u = values + i * dim, *v = u + dim;
                P first, last;
                if (n >= 32) zip(pairs(u), pairs(v), first, last);
                else zip(pairs_n(u, n), pairs_n(v, n), first, last);
                store_pairs(out + i * 32, first);
                store_pairs(out + i * 32 + 32, last);
            }
        }
    }
}

// Softmax of one row of scores, of which keys [low, high) are seen; the row's old result is scaled to the new maximum.
INLINE void soften(const Attention& a, const Scratch& s, int64_t row, int64_t count, int64_t low, int64_t high,
                   int64_t wide) {
    float* x = s.scores + row * TILE_KEYS;
    bf16* w = s.weights + row * TILE_KEYS;
    if (low >= high) {
        memset(w, 0, sizeof(bf16) * count);
        return;
    }
    F m = set1(s.most[row]);
    const bool plain = low <= 0 && high >= count && a.mask.softcap <= 0.0f;
    for (int64_t g = 0; g < count; g += 16) {
        F v = load(x + g);
        if (!plain) {
            v = within(bend(v, a.mask.softcap), set1(-INFINITY), low - g, high - g);
            store(x + g, v);
        }
        m = max(v, m);
    }
    const float higher = top(m);
    F total = zero(), shift = set1(higher);
    for (int64_t g = 0; g < count; g += 16) {
        F e = exp(load(x + g) - shift);
        if (!plain) e = within(e, zero(), low - g, high - g);
        total = total + e;
        store_half(w + g, e);
    }
    if (higher > s.most[row]) {
        const float keep = exp1(s.most[row] - higher);
        s.total[row] *= keep;
        float* o = s.out + row * wide;
        for (int64_t d = 0; d < wide; d += 16) store(o + d, load(o + d) * set1(keep));
        s.most[row] = higher;
    }
    s.total[row] += sum(total);
}

static void extend(const Attention& a, const Piece& p, uint8_t* scratch) {
    const int64_t dim = a.pages.dim, wide = padded(dim), group = a.group, rows = (p.last - p.first) * group;
    const int64_t first = a.offsets[p.row] + p.first, position = a.starts[p.row] + p.first;
    const bf16* q = a.q + (p.head * a.tokens + first) * group * wide;
    Scratch s = carve(scratch, rows, wide);
    memset(s.out, 0, sizeof(float) * rows * wide);
    for (int64_t r = 0; r < rows; r++) s.most[r] = -INFINITY, s.total[r] = 0.0f;
    for (int64_t t = p.begin / TILE_KEYS * TILE_KEYS; t < p.end; t += TILE_KEYS) {
        const int64_t count = p.end - t < TILE_KEYS ? padded(p.end - t) : TILE_KEYS;
        pack(a, p, t, count, s);
        by_tiles(rows, MAX_ROWS, [&](int64_t r, int64_t n, int64_t) {
            const int64_t last = position + (r + n - 1) / group + 1 - t, seen = last < count ? padded(last) : count;
            if (last <= 0) return;
            for (int64_t k = 0; k < seen; k += 32)
                TILES.half[0][n](s.keys + k * wide, wide, q + r * wide, wide, s.scores + r * TILE_KEYS + k, TILE_KEYS, 0);
            for (int64_t i = r; i < r + n; i++) {
                const int64_t at = position + i / group;
                const int64_t low = a.mask.window > 0 ? at - a.mask.window + 1 - t : -t;
                const int64_t high = (at + 1 < p.end ? at + 1 : p.end) - t;
                soften(a, s, i, seen, low > p.begin - t ? low : p.begin - t, high < seen ? high : seen, wide);
            }
            for (int64_t c = 0; c < wide; c += 32)
                TILES.adding[n](s.values + c * count, seen, s.weights + r * TILE_KEYS, TILE_KEYS, s.out + r * wide + c, wide, 0);
        });
    }
    for (int64_t r = 0; r < rows; r++)
        finish(a, first + r / group, p.head * group + r % group, s.most[r], s.total[r], s.out + r * wide);
}
