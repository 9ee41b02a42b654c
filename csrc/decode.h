// Attention of one query over the pages of its row, read in place. See level.cpp.
//
// Keys are taken sixteen at a time, at multiples of sixteen, and the softmax goes on from one SPAN of them to the next.
// A place outside a piece stands for its nearest token, and its score is masked: memory that no token was written to
// is never read.
#pragma once

constexpr int64_t SPAN = 128;
constexpr int64_t PARTIAL_HEAD = 16;  // floats before a partial result: maximum, sum

INLINE float exp1(float x) {
    float lanes[16];
    store(lanes, exp(set1(x)));
    return lanes[0];
}

// Addresses of the keys of tokens [t, t + 16), as far as they are in [begin, end).
INLINE void find16(const Attention& a, const int32_t* table, int64_t head, int64_t t, int64_t begin, int64_t end,
                   const bf16** at) {
    const Pages& p = a.pages;
    const bf16* base = p.base + head * p.page_tokens * p.dim;
    if (p.page_tokens % 16 == 0 && t >= begin && t + 16 <= end) {
        const bf16* first = base + table[t / p.page_tokens] * p.page_stride + t % p.page_tokens * p.dim;
        for (int i = 0; i < 16; i++) at[i] = first + i * p.dim;
        return;
    }
    for (int i = 0; i < 16; i++) {
        int64_t token = t + i < begin ? begin : t + i >= end ? end - 1 : t + i;
        at[i] = base + table[token / p.page_tokens] * p.page_stride + token % p.page_tokens * p.dim;
    }
}

// Asks for what comes next, line by line while something else is computed: keys and values of up to SPAN tokens from
// `t` on, of all heads of a piece, page after page. Pages lie scattered, and only this hides what it takes to find them.
struct Ahead {
    const Attention& a;
    const Piece* piece;
    int64_t t, run, runs;  // runs of 16 tokens: for each head its keys, then its values
    const bf16* at;
    int64_t left;
};

INLINE void aim(Ahead& ahead, const Piece* piece, int64_t t) {
    ahead.piece = piece;
    ahead.t = t;
    ahead.run = ahead.runs = ahead.left = 0;
    if (!piece || t >= piece->end || ahead.a.pages.page_tokens % 16) return;
    const int64_t tokens = piece->end - t < SPAN ? piece->end - t : SPAN;
    ahead.runs = (tokens + 15) / 16 * piece->heads * 2;
}

// The next run, which lies in one piece where pages are multiples of 16.
static void aim_next(Ahead& ahead) {
    const Pages& p = ahead.a.pages;
    const Piece& piece = *ahead.piece;
    const int64_t block = ahead.run / 2, t = ahead.t + block / piece.heads * 16, head = piece.head + block % piece.heads;
    const int32_t* table = ahead.a.table + piece.row * ahead.a.table_stride;
    ahead.at = p.base + table[t / p.page_tokens] * p.page_stride + (head * p.page_tokens + t % p.page_tokens) * p.dim +
               (ahead.run % 2 ? p.value_offset : 0);
    ahead.left = (piece.end - t < 16 ? piece.end - t : 16) * p.dim;
    ahead.run++;
}

INLINE void ask(Ahead& ahead, int64_t lines) {
    while (lines > 0) {
        if (ahead.left <= 0) {
            if (ahead.run == ahead.runs) return;
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

// Scores of one query head with sixteen keys.
INLINE F score16(const bf16* q, const bf16* const* at, int64_t dim) {
    F s[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) s[i] = zero();
    int64_t c = 0;
    for (; c + 32 <= dim; c += 32) {
        P v = pairs(q + c);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) s[i] = dot2(s[i], v, pairs(at[i] + c));
    }
    if (c < dim) {
        P v = pairs(q + c);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) s[i] = dot2(s[i], v, pairs_n(at[i] + c, dim - c));
    }
    return sums(s);
}

// Adds weights times values to HEADS rows of `out`. `count` is even.
template <int HEADS>
static void mix(const bf16* const* at, int64_t value_offset, int64_t count, const bf16* weights, float* out, int64_t dim,
                int64_t wide) {
    for (int64_t c = 0; c < dim; c += 32) {
        F o[HEADS][2];
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; h++) {
            o[h][0] = load(out + h * wide + c);
            o[h][1] = load(out + h * wide + c + 16);
        }
        const bool whole = c + 32 <= dim;
        for (int64_t t = 0; t < count; t += 2) {
            const bf16 *x = at[t] + value_offset + c, *y = at[t + 1] + value_offset + c;
            P first, last;
            if (whole) zip(pairs(x), pairs(y), first, last);
            else zip(pairs_n(x, dim - c), pairs_n(y, dim - c), first, last);
#pragma GCC unroll 4
            for (int h = 0; h < HEADS; h++) {
                P w = spread(weights + h * SPAN + t);
                o[h][0] = dot2(o[h][0], w, first);
                o[h][1] = dot2(o[h][1], w, last);
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; h++) {
            store(out + h * wide + c, o[h][0]);
            store(out + h * wide + c + 16, o[h][1]);
        }
    }
}

INLINE void mix_all(const bf16* const* at, int64_t value_offset, int64_t count, const bf16* weights, float* out,
                    int64_t dim, int64_t wide, int64_t group) {
    int64_t h = 0;
    for (; h + 4 <= group; h += 4) mix<4>(at, value_offset, count, weights + h * SPAN, out + h * wide, dim, wide);
    if (group - h == 3) mix<3>(at, value_offset, count, weights + h * SPAN, out + h * wide, dim, wide);
    if (group - h == 2) mix<2>(at, value_offset, count, weights + h * SPAN, out + h * wide, dim, wide);
    if (group - h == 1) mix<1>(at, value_offset, count, weights + h * SPAN, out + h * wide, dim, wide);
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

// Scores of 16 keys after 16 keys become weights, and the weights' sum of values is added to `out`: one head of the
// piece, tokens [t, t + count), for each of its query heads.
INLINE void span(const Attention& a, const Piece& p, int64_t head, const bf16* q, int64_t t, int64_t count, float* most,
                 float* total, float* out, Ahead& ahead) {
    const int64_t dim = a.pages.dim, wide = padded(dim), group = a.group;
    alignas(64) float scores[MAX_GROUP * SPAN];
    alignas(64) bf16 weights[MAX_GROUP * SPAN];
    const bf16* at[SPAN];
    const int64_t lines = (dim + group - 1) / group;  // 16 keys and 16 values of a head have `dim` lines
    for (int64_t g = 0; g < count; g += 16) {
        find16(a, a.table + p.row * a.table_stride, head, t + g, p.begin, p.end, at + g);
        for (int64_t h = 0; h < group; h++) {
            ask(ahead, lines);
            F s = bend(score16(q + h * wide, at + g, dim), a.mask.softcap);
            store(scores + h * SPAN + g, within(s, set1(-INFINITY), p.begin - t - g, p.end - t - g));
        }
    }
    for (int64_t h = 0; h < group; h++) {
        float* s = scores + h * SPAN;
        F m = set1(most[h]);
        for (int64_t g = 0; g < count; g += 16) m = max(load(s + g), m);
        const float higher = top(m), keep = exp1(most[h] - higher);
        F sum_of = zero();
        for (int64_t g = 0; g < count; g += 16) {
            F e = within(exp(load(s + g) - set1(higher)), zero(), p.begin - t - g, p.end - t - g);
            sum_of = sum_of + e;
            store_half(weights + h * SPAN + g, e);
        }
        total[h] = total[h] * keep + sum(sum_of);
        most[h] = higher;
        if (t > p.begin)
            for (int64_t d = 0; d < wide; d += 16) store(out + h * wide + d, load(out + h * wide + d) * set1(keep));
    }
    mix_all(at, a.pages.value_offset, count, weights, out, dim, wide, group);
}

// `then`: what this thread is likely to compute next, or null.
static void decode(const Attention& a, const Piece& p, const Piece* then) {
    const int64_t dim = a.pages.dim, wide = padded(dim), group = a.group, rows = p.heads * group;
    const int64_t token = a.offsets[p.row] + p.first;
    alignas(64) float out[MAX_GROUP * 512];
    float most[MAX_GROUP], total[MAX_GROUP];
    for (int64_t h = 0; h < rows; h++) most[h] = -INFINITY, total[h] = 0.0f;
    memset(out, 0, sizeof(float) * rows * wide);
    Ahead ahead{a, nullptr, 0, 0, 0, nullptr, 0};
    for (int64_t t = p.begin / 16 * 16; t < p.end; t += SPAN) {
        const int64_t count = p.end - t < SPAN ? (p.end - t + 15) / 16 * 16 : SPAN;
        if (t + SPAN < p.end) aim(ahead, &p, t + SPAN);
        else aim(ahead, then, then ? then->begin / 16 * 16 : 0);
        for (int64_t k = 0; k < p.heads; k++) {
            const bf16* q = a.q + ((p.head + k) * a.tokens + token) * group * wide;
            span(a, p, p.head + k, q, t, count, most + k * group, total + k * group, out + k * group * wide, ahead);
        }
        ask(ahead, INT64_MAX);
    }
    for (int64_t h = 0; h < rows; h++) {
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
    const int64_t wide = padded(a.pages.dim), stride = PARTIAL_HEAD + wide;
    alignas(64) float out[512];
    for (int64_t h = 0; h < a.group; h++) {
        float most = -INFINITY, total = 0.0f;
        for (int64_t i = 0; i < count; i++) {
            const float m = partials[(i * a.group + h) * stride];
            most = m > most ? m : most;
        }
        memset(out, 0, sizeof(float) * wide);
        for (int64_t i = 0; i < count; i++) {
            const float* from = partials + (i * a.group + h) * stride;
            const float keep = exp1(from[0] - most);
            total += from[1] * keep;
            for (int64_t d = 0; d < wide; d += 16)
                store(out + d, fma(load(from + PARTIAL_HEAD + d), set1(keep), load(out + d)));
        }
        finish(a, a.offsets[p.row] + p.first, p.head * a.group + h, most, total, out);
    }
}
