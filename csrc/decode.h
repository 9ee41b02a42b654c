// Attention of one query over the pages of its row, read in place. See level.cpp.
//
// Tokens are taken in runs of sixteen, at multiples of sixteen, and the softmax goes on from one span of them to the
// next. The heads of a piece, which lie side by side in a page, take turns with each span. A place outside a piece
// stands for its nearest token, and its score is masked: memory that no token was written to is never read.
#pragma once

constexpr int64_t SPAN = 128;
constexpr int64_t RUN = 16;
constexpr int HEADS_AT_ONCE = 4;  // query heads that share what is loaded of keys and values
constexpr int64_t RUN_ROOM = 2 * RUN * MAX_DIM;
constexpr int64_t PARTIAL_HEAD = 16;  // floats before a partial result: maximum, sum

INLINE float exp1(float x) {
    float lanes[16];
    store(lanes, exp(set1(x)));
    return lanes[0];
}

// Keys and values of a run, one token behind the other.
struct Run {
    const bf16 *keys, *values;
};

// Tokens [t, t + RUN) of a head of a piece: where they lie, or, where that is not in one piece, copied to `room`.
INLINE Run find(const Attention& a, const Piece& p, int64_t head, int64_t t, bf16* room) {
    const Pages& pages = a.pages;
    const int64_t size = pages.page_tokens, dim = pages.dim;
    const int32_t* table = a.table + p.row * a.table_stride;
    const bf16* base = pages.base + head * size * dim;
    if (size % RUN == 0 && t >= p.begin && t + RUN <= p.end) {
        const bf16* keys = base + table[t / size] * pages.page_stride + t % size * dim;
        return {keys, keys + pages.value_offset};
    }
    for (int64_t i = 0; i < RUN; i++) {
        const int64_t token = t + i < p.begin ? p.begin : t + i >= p.end ? p.end - 1 : t + i;
        const bf16* key = base + table[token / size] * pages.page_stride + token % size * dim;
        memcpy(room + i * dim, key, sizeof(bf16) * dim);
        memcpy(room + (RUN + i) * dim, key + pages.value_offset, sizeof(bf16) * dim);
    }
    return {room, room + RUN * dim};
}

// How many tokens of a piece are computed at once, and asked for before that.
INLINE int64_t span_of(const Piece& p) { return p.heads > 1 ? SPAN / 2 : SPAN; }

// Asks for what comes next, line by line while something else is computed: a span of a piece, run by run the keys of
// `heads` heads from `head` on, then their values. Pages lie scattered, and only this hides what it takes to find them.
struct Ahead {
    const Attention& a;
    const Piece* piece;
    int64_t head, heads, t, end, side;
    const bf16* at;
    int64_t left;
};

INLINE void aim(Ahead& ahead, const Piece* piece, int64_t t, int64_t head, int64_t heads) {
    ahead.piece = piece;
    ahead.head = head, ahead.heads = heads;
    ahead.t = ahead.end = ahead.side = ahead.left = 0;
    if (!piece || ahead.a.pages.page_tokens % RUN) return;
    const int64_t span = span_of(*piece);
    ahead.t = t;
    ahead.end = t + span < piece->end ? t + span : piece->end;
}

// What follows in a piece from `t` on, or else what the piece `then` begins with.
INLINE void aim_behind(Ahead& ahead, const Piece& p, int64_t t, const Piece* then) {
    if (t < p.end) aim(ahead, &p, t, p.head, p.heads);
    else if (then) aim(ahead, then, then->begin / RUN * RUN, then->head, then->heads);
    else aim(ahead, nullptr, 0, 0, 0);
}

// The next run's keys or values of a head, which lie in one piece.
static void aim_next(Ahead& ahead) {
    const Pages& p = ahead.a.pages;
    const Piece& piece = *ahead.piece;
    const int64_t t = ahead.t;
    const bf16* page = p.base + (ahead.a.table + piece.row * ahead.a.table_stride)[t / p.page_tokens] * p.page_stride;
    const bool values = ahead.side >= ahead.heads;
    const int64_t head = ahead.head + ahead.side - (values ? ahead.heads : 0);
    ahead.at = page + (values ? p.value_offset : 0) + (head * p.page_tokens + t % p.page_tokens) * p.dim;
    ahead.left = (piece.end - t < RUN ? piece.end - t : RUN) * p.dim;
    if (++ahead.side == 2 * ahead.heads) ahead.side = 0, ahead.t += RUN;
}

INLINE void ask(Ahead& ahead, int64_t lines) {
    while (lines > 0) {
        if (ahead.left <= 0) {
            if (ahead.t >= ahead.end) return;
            aim_next(ahead);
        }
        const int64_t left = (ahead.left + 31) / 32, count = lines < left ? lines : left;
        for (int64_t i = 0; i < count; i++) __builtin_prefetch(ahead.at + 32 * i, 0, 2);
        ahead.at += 32 * count;
        ahead.left -= 32 * count;
        lines -= count;
    }
}

INLINE F bend(F s, float softcap) { return softcap > 0.0f ? tanh(s * set1(1.0f / softcap)) * set1(softcap) : s; }

// Scores of HEADS query heads, `wide` apart, with the keys of a run.
template <int HEADS>
INLINE void score(const bf16* q, int64_t wide, const bf16* keys, int64_t dim, F* scores, Ahead& ahead,
                  int64_t lines) {
    F some[HEADS][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        F s[HEADS][4];
        const bf16* from = keys + 4 * i * dim;
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) s[h][k] = zero();
        for (int64_t c = 0; c < dim; c += 32) {
            ask(ahead, lines);
            P v[HEADS];
#pragma GCC unroll 4
            for (int h = 0; h < HEADS; h++) v[h] = pairs(q + h * wide + c);
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                const bf16* at = from + k * dim + c;
                const P key = c + 32 <= dim ? pairs(at) : pairs_n(at, dim - c);
#pragma GCC unroll 4
                for (int h = 0; h < HEADS; h++) s[h][k] = dot2(s[h][k], v[h], key);
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; h++) some[h][i] = sums_of_four(s[h]);
    }
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++) scores[h] = sums_of_sixteen(some[h]);
}

// Adds weights times values of `count` runs to HEADS rows of `out`: 32 * BLOCKS columns from `c` on.
template <int HEADS, int BLOCKS>
INLINE void mix(const Run* runs, int64_t count, const bf16* weights, float* out, int64_t c, int64_t dim, int64_t wide,
                Ahead& ahead, int64_t lines) {
    F o[HEADS][2 * BLOCKS];
    const int64_t left = dim - c;
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 4
        for (int b = 0; b < 2 * BLOCKS; b++) o[h][b] = load(out + h * wide + c + 16 * b);
    for (int64_t r = 0; r < count; r++) {
        const bf16* values = runs[r].values + c;
        for (int k = 0; k < RUN; k += 2) {
            ask(ahead, lines);
            P v[2 * BLOCKS];
            const bf16 *x = values + k * dim, *y = x + dim;
#pragma GCC unroll 2
            for (int b = 0; b < 32 * BLOCKS; b += 32) {
                if (left >= 32 * BLOCKS) zip(pairs(x + b), pairs(y + b), v[b / 16], v[b / 16 + 1]);
                else zip(pairs_n(x + b, left - b), pairs_n(y + b, left - b), v[b / 16], v[b / 16 + 1]);
            }
#pragma GCC unroll 4
            for (int h = 0; h < HEADS; h++) {
                const P w = spread(weights + h * SPAN + r * RUN + k);
#pragma GCC unroll 4
                for (int b = 0; b < 2 * BLOCKS; b++) o[h][b] = dot2(o[h][b], w, v[b]);
            }
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 4
        for (int b = 0; b < 2 * BLOCKS; b++) store(out + h * wide + c + 16 * b, o[h][b]);
}

INLINE void finish(const Attention& a, int64_t token, int64_t head, float most, float total, const float* from) {
    float scale = 1.0f;
    if (a.mask.sinks) {
        const float sink = a.mask.sinks[head], higher = sink > most ? sink : most;
        scale = exp1(most - higher);
        total = total * scale + exp1(sink - higher);
    }
    F factor = set1(scale / total);
    const int64_t dim = a.pages.dim;
    float* to = a.out + (token * a.kv_heads * a.group + head) * dim;
    for (int64_t d = 0; d < dim; d += 16) store_n(to + d, load(from + d) * factor, dim - d);
}

// A span of a piece for HEADS of its query heads: scores become weights, and the weights' sum of values is added to
// `out`. Tokens [t, t + RUN * count).
template <int HEADS>
static void span(const Attention& a, const Piece& p, const bf16* q, const Run* runs, int64_t t, int64_t count,
                 float* most, float* total, float* out, Ahead& ahead) {
    const int64_t dim = a.pages.dim, wide = padded(dim), end = count * RUN;
    // As many lines are asked for as are computed with, a few behind each bit of both products: the core waits for no
    // more than some twenty at a time, and what is computed with would wait behind the others.
    const int64_t heads = (a.group + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE, lines = (4 + heads - 1) / heads;
    alignas(64) float scores[HEADS * SPAN];
    alignas(64) bf16 weights[HEADS * SPAN];
    for (int64_t r = 0; r < count; r++) {
        F s[HEADS];
        score<HEADS>(q, wide, runs[r].keys, dim, s, ahead, lines);
        const int64_t low = p.begin - t - r * RUN, high = p.end - t - r * RUN;
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; h++)
            store(scores + h * SPAN + r * RUN, within(bend(s[h], a.mask.softcap), set1(-INFINITY), low, high));
    }
    for (int h = 0; h < HEADS; h++) {
        float* s = scores + h * SPAN;
        F m = set1(most[h]);
        for (int64_t g = 0; g < end; g += 16) m = max(load(s + g), m);
        const float higher = top(m), keep = exp1(most[h] - higher);
        F sum_of = zero();
        for (int64_t g = 0; g < end; g += 16) {
            F e = within(exp(load(s + g) - set1(higher)), zero(), p.begin - t - g, p.end - t - g);
            sum_of = sum_of + e;
            store_half(weights + h * SPAN + g, e);
        }
        total[h] = total[h] * keep + sum(sum_of);
        most[h] = higher;
        if (t > p.begin)
            for (int64_t d = 0; d < wide; d += 16) store(out + h * wide + d, load(out + h * wide + d) * set1(keep));
    }
    int64_t c = 0;
    for (; c + 64 <= dim; c += 64) mix<HEADS, 2>(runs, count, weights, out, c, dim, wide, ahead, lines);
    for (; c < dim; c += 32) mix<HEADS, 1>(runs, count, weights, out, c, dim, wide, ahead, lines);
}

using SpanOf = void (*)(const Attention&, const Piece&, const bf16*, const Run*, int64_t, int64_t, float*, float*,
                        float*, Ahead&);
// `span` by the number of heads.
struct SpanTable {
    SpanOf of[HEADS_AT_ONCE + 1] = {};
    constexpr SpanTable() { fill<HEADS_AT_ONCE>(); }
    template <int HEADS>
    constexpr void fill() {
        of[HEADS] = span<HEADS>;
        if constexpr (HEADS > 1) fill<HEADS - 1>();
    }
};
static constexpr SpanTable SPANS;

// `fresh`: nobody has asked for its beginning. `then`: what this thread is likely to compute next, or null.
static void decode(const Attention& a, const Piece& p, bool fresh, const Piece* then) {
    const int64_t dim = a.pages.dim, wide = padded(dim), group = a.group, heads = p.heads * group;
    const int64_t token = a.offsets[p.row] + p.first;
    alignas(64) float out[MAX_GROUP * MAX_DIM];
    alignas(64) bf16 room[SPAN / RUN * RUN_ROOM];
    float most[MAX_GROUP], total[MAX_GROUP];
    Run runs[SPAN / RUN];
    for (int64_t h = 0; h < heads; h++) most[h] = -INFINITY, total[h] = 0.0f;
    memset(out, 0, sizeof(float) * heads * wide);
    Ahead ahead{a, nullptr, 0, 0, 0, 0, 0, nullptr, 0};
    const int64_t begin = p.begin / RUN * RUN, length = span_of(p);
    if (fresh) {
        aim(ahead, &p, begin, p.head, 1);
        ask(ahead, INT64_MAX);
    }
    for (int64_t t = begin; t < p.end; t += length) {
        const int64_t count = ((p.end - t < length ? p.end - t : length) + RUN - 1) / RUN;
        const bool unasked = fresh && t == begin;  // then each head asks for the next one's share of this span
        for (int64_t kv = 0; kv < p.heads; kv++) {
            const bool last = kv + 1 == p.heads;
            if (unasked && !last) aim(ahead, &p, t, p.head + kv + 1, 1);
            else if (unasked || kv == 0) aim_behind(ahead, p, t + length, then);
            const bf16* q = a.q + ((p.head + kv) * a.tokens + token) * group * wide;
            for (int64_t r = 0; r < count; r++) runs[r] = find(a, p, p.head + kv, t + r * RUN, room + r * RUN_ROOM);
            by_tiles(group, HEADS_AT_ONCE, [&](int64_t h, int64_t n) {
                const int64_t at = kv * group + h;
                SPANS.of[n](a, p, q + h * wide, runs, t, count, most + at, total + at, out + at * wide, ahead);
            });
            if (unasked || last) ask(ahead, INT64_MAX);
        }
    }
    for (int64_t h = 0; h < heads; h++) {
        if (!p.partial) {
            finish(a, token, p.head * group + h, most[h], total[h], out + h * wide);
            continue;
        }
        float* to = p.partial + h * (PARTIAL_HEAD + wide);
        to[0] = most[h], to[1] = total[h];
        memcpy(to + PARTIAL_HEAD, out + h * wide, sizeof(float) * wide);
    }
}

// The result of a query from `count` partial ones, which lie one behind the other.
static void merge(const Attention& a, const Piece& p, const float* partials, int64_t count) {
    const int64_t wide = padded(a.pages.dim), stride = PARTIAL_HEAD + wide, heads = p.heads * a.group;
    alignas(64) float out[MAX_DIM];
    for (int64_t h = 0; h < heads; h++) {
        float most = -INFINITY, total = 0.0f;
        for (int64_t i = 0; i < count; i++) {
            const float m = partials[(i * heads + h) * stride];
            most = m > most ? m : most;
        }
        memset(out, 0, sizeof(float) * wide);
        for (int64_t i = 0; i < count; i++) {
            const float* from = partials + (i * heads + h) * stride;
            const float keep = exp1(from[0] - most);
            total += from[1] * keep;
            for (int64_t d = 0; d < wide; d += 16)
                store(out + d, fma(load(from + PARTIAL_HEAD + d), set1(keep), load(out + d)));
        }
        finish(a, a.offsets[p.row] + p.first, p.head * a.group + h, most, total, out);
    }
}
