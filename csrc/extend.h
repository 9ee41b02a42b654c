// Attention of many queries of one row over its pages: prompt chunks. See level.cpp.
//
// The query rows of one KV head, ordered by token and then by head, enter two products. The first multiplies the keys
// of a tile, which are repacked from their pages to the layout of linear weights. The second multiplies the softmax
// weights with the tile's values. An online softmax carries over from tile to tile (arXiv:2205.14135). Tiles begin at
// multiples of TILE_KEYS, so a query's result has the same bits in any chunk.
#pragma once

static_assert(MAX_QUERY_ROWS <= TILE_ROWS);
constexpr float LEAST = -1e30f;  // below all scores

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
    s.weights = (bf16*)take(TILE_ROWS * TILE_KEYS * 2);
    s.scores = (float*)take(TILE_ROWS * TILE_KEYS * 4);
    s.out = (float*)take(rows * wide * 4);
    s.most = (float*)take(rows * 4);
    s.total = (float*)take(rows * 4);
    return s;
}

// Packs tokens [t, t + count) of the row as weights: keys [count / 32][wide / 2][32][2], and with VALUES values [wide /
// 32][count / 2][32][2].
template <bool VALUES = true>
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
            if (!VALUES) continue;
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

// 2^x for x <= 0, within 3e-6, which suffices because weights are rounded to bf16. About 1e-38 below -126.
INLINE F power2(F x) {
    x = max(x, set1(-126.0f));
    F n = round(x), r = x - n;
    F p = set1(9.582843380e-3f);
    p = fma(p, r, set1(5.590642563e-2f));
    p = fma(p, r, set1(2.402409878e-1f));
    p = fma(p, r, set1(6.931241934e-1f));
    p = fma(p, r, set1(1.0f));
    return scale2(p, n);
}

constexpr float LOG2E = 1.44269504f;

// Keys [low, high) of a tile that a row sees.
struct Seen {
    int64_t low, high;
};

// The maximum of `count` scores, lane by lane; masked scores are overwritten with LEAST.
INLINE F greatest(float* x, int64_t count, const Seen& seen, float softcap) {
    F m = set1(LEAST);
    for (int64_t g = 0; g < count; g += 16) {
        F v = within(bend(load(x + g), softcap), set1(LEAST), seen.low - g, seen.high - g);
        store(x + g, v);
        m = max(v, m);
    }
    return m;
}

// The same for all keys of a tile. Skips NaN, too.
INLINE F greatest(const float* x) {
    F m = set1(LEAST);
#pragma GCC unroll 8
    for (int64_t g = 0; g < TILE_KEYS; g += 16) m = max(load(x + g), m);
    return m;
}

// Computes weights of `count` scores relative to the maximum `highest`, and their sum lane by lane. ALL: no key is
// masked.
template <bool ALL>
INLINE F weigh_keys(const float* x, bf16* weights, int64_t count, const Seen& seen, float highest) {
    F total = zero(), scale = set1(LOG2E), shift = set1(-LOG2E * highest);
#pragma GCC unroll 8
    for (int64_t g = 0; g < count; g += 16) {
        F e = power2(fma(load(x + g), scale, shift));
        if (!ALL) e = within(e, zero(), seen.low - g, seen.high - g);
        total = total + e;
        store_half(weights + g, e);
    }
    return total;
}

// Folds each of n vectors to one lane; n is at most 16.
template <class Op>
INLINE F fold_rows(F* rows, int64_t n, Op op) {
    for (int64_t i = n; i < 16; i++) rows[i] = zero();
    F some[4];
    for (int i = 0; i < 4; i++) some[i] = fold_four(rows + 4 * i, op);
    return fold_sixteen(some, op);
}

// Softmax of rows [row, row + n), n at most TILE_ROWS, over `count` scores each. `keep` receives the factors that
// rescale old results to the new maxima. Each stage processes all rows, so that no row's fold stalls the next stage.
// PLAIN: all keys of a full tile, unmasked and without softcap; otherwise `see` returns the keys that a row sees.
template <bool PLAIN, class See>
INLINE void soften(const Scratch& s, int64_t row, int64_t n, int64_t count, float softcap, const See& see, float* keep) {
    float *most = s.most + row, *total = s.total + row;
    Seen seen[TILE_ROWS];
    F lanes[TILE_ROWS];
    alignas(64) float highest[TILE_ROWS];
    for (int64_t i = 0; i < n; i++) {
        float* x = s.scores + i * TILE_KEYS;
        lanes[i] = PLAIN ? greatest(x) : greatest(x, count, seen[i] = see(row + i), softcap);
    }
    F before = load_n(most, n), now = max(before, fold_rows(lanes, n, Most()));
    store(highest, now);
    store(keep, power2((before - now) * set1(LOG2E)));
    for (int64_t i = 0; i < n; i++) {
        const float* x = s.scores + i * TILE_KEYS;
        bf16* weights = s.weights + i * TILE_KEYS;
        lanes[i] = weigh_keys<PLAIN>(x, weights, PLAIN ? TILE_KEYS : count, seen[i], highest[i]);
    }
    store_n(total, load_n(total, n) * load(keep) + fold_rows(lanes, n, Add()), n);
    store_n(most, now, n);
}

static void extend(const Attention& a, const Piece& p, uint8_t* scratch) {
    const int64_t dim = a.pages.dim, wide = padded(dim), group = a.group, rows = (p.last - p.first) * group;
    const int64_t first = a.offsets[p.row] + p.first, position = a.starts[p.row] + p.first;
    const bf16* q = a.q + (p.head * a.tokens + first) * group * wide;
    Scratch s = carve(scratch, rows, wide);
    const QueryMultiplier multiplier((rows - 1) / ((rows - 1) / MAX_QUERY_ROWS + 1) + 1);  // rows of the largest tile
    memset(s.out, 0, sizeof(float) * rows * wide);
    for (int64_t r = 0; r < rows; r++) s.most[r] = LEAST, s.total[r] = 0.0f;
    for (int64_t t = p.begin / TILE_KEYS * TILE_KEYS; t < p.end; t += TILE_KEYS) {
        const int64_t count = p.end - t < TILE_KEYS ? padded(p.end - t) : TILE_KEYS;
        pack(a, p, t, count, s);
        by_tiles(rows, MAX_QUERY_ROWS, true, [&](int64_t r, int64_t n, int64_t) {
            const int64_t last = position + (r + n - 1) / group + 1 - t;  // keys that the tile's last row sees
            if (last <= 0) return;
            const int64_t seen = last < count ? padded(last) : count, weighed = last < count ? (last + 1) / 2 * 2 : count;
            multiplier.score(s.keys, wide, seen, q + r * wide, n, s.scores);
            alignas(64) float keep[TILE_ROWS];
            const auto see = [&](int64_t i) -> Seen {
                const int64_t at = position + i / group, low = a.mask.window > 0 ? at - a.mask.window + 1 : 0;
                return {(low > p.begin ? low : p.begin) - t, at + 1 - t};
            };
            const bool plain = count == TILE_KEYS && see(r).high >= count && see(r + n - 1).low <= 0 && a.mask.softcap <= 0.0f;
            if (plain) soften<true>(s, r, n, count, 0.0f, see, keep);
            else soften<false>(s, r, n, seen, a.mask.softcap, see, keep);
            multiplier.mix(s.values, count, weighed, s.weights, n, s.out + r * wide, wide, keep);
        });
    }
    for (int64_t r = 0; r < rows; r++)
        finish(a, first + r / group, p.head * group + r % group, s.most[r], s.total[r], s.out + r * wide);
}
