// Attention of one decode query over the pages of its row, read in place. See level.cpp.
//
// Tokens are processed in runs of RUN, at multiples of RUN; an online softmax carries over from span to span. The heads
// of a piece are adjacent in a page and process a span together: first all their keys, then all their values. This
// reads memory sequentially. Pages are scattered, so latency is hidden by prefetching. Each run prefetches the run at
// its place in the next span, at the rate at which it reads. A burst of prefetches would stall or be dropped. The
// softmax between keys and values prefetches the values of a span's last run, because memory would idle meanwhile. The
// last span prefetches what the thread reads first in the next operation. A token position outside a piece reads the
// nearest token inside, and its score is masked: unwritten memory is never read.
//
// A query's keys are cut into segments at multiples of SEGMENT tokens; the segment size doubles with many keys. Each
// segment has its own softmax. Segment results are added in key order, independent of the computing threads. The bits
// of a query's result therefore depend on its keys alone, not on the number of threads or rows, nor on the pages.
#pragma once

constexpr int64_t SPAN = 64;
constexpr int64_t RUNS = SPAN / RUN;
constexpr int HEADS_AT_ONCE = 4;  // query heads that share loaded keys and values

// Scores of HEADS query heads, `wide` apart, with the keys of a run. ASK: prefetches as many keys from `next` on.
template <int HEADS, bool ASK>
INLINE void score(const bf16* q, int64_t wide, const bf16* keys, int64_t dim, const bf16* next, F* scores) {
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
            P v[HEADS];
#pragma GCC unroll 4
            for (int h = 0; h < HEADS; h++) v[h] = pairs(q + h * wide + c);
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                const bf16* at = from + k * dim + c;
                if (ASK) ask_beside(next + 32 * k, at);
                const P key = c + 32 <= dim ? pairs(at) : pairs_n(at, dim - c);
#pragma GCC unroll 4
                for (int h = 0; h < HEADS; h++) s[h][k] = dot2(s[h][k], v[h], key);
            }
            next += 4 * 32;
        }
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; h++) some[h][i] = fold_four(s[h], Add());
    }
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++) scores[h] = fold_sixteen(some[h], Add());
}

// Scores of `count` runs, SPAN apart for each head.
template <int HEADS, bool ASK>
static void score_runs(const Attention& a, const bf16* q, const Run* runs, int64_t count, float* scores) {
    const int64_t dim = a.pages.dim;
    for (int64_t r = 0; r < count; r++) {
        F s[HEADS];
        score<HEADS, ASK>(q, padded(dim), runs[r].keys, dim, runs[r].next_keys, s);
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; h++) store(scores + h * SPAN + r * RUN, bend(s[h], a.mask.softcap));
    }
}

// HEADS rows of `out` are scaled by `keep`, and the weighted values of `count` runs are added: 32 * BLOCKS columns from
// `c` on. ASK: prefetches as many values of the next runs.
template <int HEADS, int BLOCKS, bool ASK>
INLINE void mix(const Pages& pages, const Run* runs, int64_t count, const bf16* weights, const float* keep, float* out,
                int64_t c) {
    F o[HEADS][2 * BLOCKS];
    const int64_t dim = pages.dim, left = dim - c, wide = padded(dim);
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 4
        for (int b = 0; b < 2 * BLOCKS; b++) o[h][b] = load(out + h * wide + c + 16 * b) * set1(keep[h]);
    for (int64_t r = 0; r < count; r++) {
        const bf16 *values = runs[r].values + c, *next = runs[r].next_values + c * RUN;
        for (int k = 0; k < RUN; k += 2) {
            P w[HEADS];
            const bf16 *x = values + k * dim, *y = x + dim;
#pragma GCC unroll 4
            for (int h = 0; h < HEADS; h++) w[h] = spread(weights + h * SPAN + r * RUN + k);
#pragma GCC unroll 2
            for (int b = 0; b < 2 * BLOCKS; b += 2) {
                P u, v;
                if (ASK) ask_beside(next + 32 * b, x + 16 * b);
                if (left >= 32 * BLOCKS) zip(pairs(x + 16 * b), pairs(y + 16 * b), u, v);
                else zip(pairs_n(x + 16 * b, left - 16 * b), pairs_n(y + 16 * b, left - 16 * b), u, v);
#pragma GCC unroll 4
                for (int h = 0; h < HEADS; h++) o[h][b] = dot2(o[h][b], w[h], u);
                if (ASK) ask_beside(next + 32 * b + 32, y + 16 * b);
#pragma GCC unroll 4
                for (int h = 0; h < HEADS; h++) o[h][b + 1] = dot2(o[h][b + 1], w[h], v);
            }
            next += 2 * 32 * BLOCKS;
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 4
        for (int b = 0; b < 2 * BLOCKS; b++) store(out + h * wide + c + 16 * b, o[h][b]);
}

template <int HEADS, bool ASK>
static void mix_runs(const Pages& pages, const Run* runs, int64_t count, const bf16* weights, const float* keep,
                     float* out) {
    int64_t c = 0;
    for (; c + 64 <= pages.dim; c += 64) mix<HEADS, 2, ASK>(pages, runs, count, weights, keep, out, c);
    for (; c < pages.dim; c += 32) mix<HEADS, 1, ASK>(pages, runs, count, weights, keep, out, c);
}

// Kernels by number of heads. [1]: those that prefetch, for the first heads of all that share keys and values.
struct RunsTable {
    void (*score[2][HEADS_AT_ONCE + 1])(const Attention&, const bf16*, const Run*, int64_t, float*) = {};
    void (*mix[2][HEADS_AT_ONCE + 1])(const Pages&, const Run*, int64_t, const bf16*, const float*, float*) = {};
    constexpr RunsTable() { fill<HEADS_AT_ONCE>(); }
    template <int HEADS>
    constexpr void fill() {
        score[0][HEADS] = score_runs<HEADS, false>, score[1][HEADS] = score_runs<HEADS, true>;
        mix[0][HEADS] = mix_runs<HEADS, false>, mix[1][HEADS] = mix_runs<HEADS, true>;
        if constexpr (HEADS > 1) fill<HEADS - 1>();
    }
};
static constexpr RunsTable OF_RUNS;

// Partial result of a piece's query heads over some keys: the maximum score, the sum of weights, and the weighted
// values.
struct Result {
    float *most, *total, *out;
};
INLINE Result result_at(float* at, int64_t heads) {
    const int64_t head = (heads + 15) / 16 * 16;
    return {at, at + head, at + 2 * head};
}

// Adds to `sum` the result of the keys after it, for `heads` heads `wide` floats apart.
static void join(const Result& sum, const Result& more, int64_t heads, int64_t wide) {
    alignas(64) float of_sum[MAX_GROUP], of_more[MAX_GROUP];
    for (int64_t h = 0, n; h < heads; h += 16) {
        n = heads - h;
        F s = load_n(sum.most + h, n), m = load_n(more.most + h, n), most = max(s, m);
        s = exp(s - most), m = exp(m - most);
        store_n(sum.most + h, most, n);
        store_n(sum.total + h, fma(load_n(more.total + h, n), m, load_n(sum.total + h, n) * s), n);
        store(of_sum + h, s);
        store(of_more + h, m);
    }
    for (int64_t h = 0; h < heads; h++) {
        const F s = set1(of_sum[h]), m = set1(of_more[h]);
        for (int64_t d = h * wide; d < h * wide + wide; d += 16)
            store(sum.out + d, fma(load(more.out + d), m, load(sum.out + d) * s));
    }
}

// State of each query head of a segment: its result so far, sixteen partial sums of its weights, and `keep`, the factor
// by which the newest span rescales earlier results. `ones`: factors of 1.
struct Softmax {
    Result result;
    float sums[MAX_GROUP * 16], keep[MAX_GROUP], ones[MAX_GROUP];
};

INLINE void begin_segment(Softmax& s, float* at, int64_t heads, int64_t wide) {
    s.result = result_at(at, heads);
    for (int64_t h = 0; h < heads; h++) s.result.most[h] = -INFINITY;
    memset(s.sums, 0, sizeof(float) * heads * 16);
    memset(s.result.out, 0, sizeof(float) * heads * wide);
}

// Turns scores of `heads` heads, at most sixteen, with a span of `places` positions into weights. Positions [low, high)
// of the span are visible. Meanwhile `lines` cache lines from `next` on are prefetched, unless `next` is null.
static void soften_span(Softmax& s, int64_t head, int64_t heads, int64_t places, int64_t low, int64_t high,
                        float* scores, bf16* weights, const bf16* next, int64_t lines) {
    const bool plain = low <= 0 && high >= places;
    const int64_t end = head + heads, turns = heads * places / 16;
    const int64_t early = next ? lines / (2 * turns) : 0, late = next ? (lines - 1) / turns + 1 - early : 0;
    for (int64_t h = head; h < end; h++) {
        F m = set1(s.result.most[h]);
        for (int64_t g = 0; g < places; g += 16) {
            F x = load(scores + h * SPAN + g);
            ask_lines(next, early);
            if (!plain) store(scores + h * SPAN + g, x = within(x, set1(-INFINITY), low - g, high - g));
            m = max(x, m);
        }
        s.keep[h] = s.result.most[h];
        s.result.most[h] = top(m);
    }
    store_n(s.keep + head, exp(load_n(s.keep + head, heads) - load_n(s.result.most + head, heads)), heads);
    for (int64_t h = head; h < end; h++) {
        const F most = set1(s.result.most[h]);
        F sum = load(s.sums + 16 * h) * set1(s.keep[h]);
        for (int64_t g = 0; g < places; g += 16) {
            F e = exp(load(scores + h * SPAN + g) - most);
            ask_lines(next, late);
            if (!plain) e = within(e, zero(), low - g, high - g);
            sum = sum + e;
            store_half(weights + h * SPAN + g, e);
        }
        store(s.sums + 16 * h, sum);
    }
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

// Number of runs of a piece from `t` on in one span.
INLINE int64_t runs_from(const Piece& p, int64_t t) {
    const int64_t end = t / SPAN * SPAN + SPAN;
    return ((p.end < end ? p.end : end) - t + RUN - 1) / RUN;
}
INLINE int64_t first_run(const Piece& p) { return p.begin / RUN * RUN; }

// Calls f(KV head of the piece, run, runs in one page, query head of the piece, number of heads, whether
// these are the KV head's first) for all runs of the span at `t`, in memory order.
template <class Call>
INLINE void by_pages(const Attention& a, const Piece& p, int64_t t, Call&& f) {
    const int64_t size = a.pages.page_tokens, count = runs_from(p, t);
    for (int64_t r = 0, n; r < count; r += n) {
        n = size % RUN ? 1 : (size - (t + r * RUN) % size) / RUN;
        if (n > count - r) n = count - r;
        for (int64_t kv = 0; kv < p.heads; kv++)
            by_tiles(a.group, HEADS_AT_ONCE, true,
                     [&](int64_t h, int64_t at_once, int64_t) { f(kv, r, n, kv * a.group + h, at_once, h == 0); });
    }
}

// `fresh`: no earlier piece prefetched this piece. `then`: the piece this thread likely computes next; null: `soon`.
static void decode(const Attention& a, const Piece& p, bool fresh, const Piece* then, const Soon& soon) {
    const int64_t wide = padded(a.pages.dim), group = a.group, heads = p.heads * group;
    const int64_t token = a.offsets[p.row] + p.first, floats = result_floats(heads, wide);
    alignas(64) float scores[MAX_GROUP * SPAN], own[MAX_GROUP * (MAX_DIM + 2)], other[MAX_GROUP * (MAX_DIM + 2)];
    alignas(64) bf16 room[RUNS * RUN_ROOM], weights[MAX_GROUP * SPAN];
    Softmax softmax;
    Run runs[MAX_GROUP * RUNS];
    const bf16* late[MAX_GROUP];
    for (int64_t h = 0; h < heads; h++) softmax.ones[h] = 1.0f;
    float* segment = p.partial ? p.partial : own;
    const Result whole = result_at(segment, heads);
    begin_segment(softmax, segment, heads, wide);
    if (fresh)  // keys only: values are prefetched while the keys are used
        for (int64_t r = 0; r < runs_from(p, first_run(p)); r++)
            for (int64_t kv = 0; kv < p.heads; kv++)
                ask_run(key_of(a, p.row, p.head + kv, first_run(p) + r * RUN), a.pages.row);
    for (int64_t t = first_run(p), count; t < p.end; t += count * RUN) {
        count = runs_from(p, t);
        const Piece* next = t + count * RUN < p.end ? &p : then;
        const int64_t from = next == &p ? t + count * RUN : next ? first_run(*next) : 0;
        const int64_t more = next ? runs_from(*next, from) : 0;
        if (t > p.begin && t % p.segment == 0) {
            segment = p.apart ? segment + floats : other;
            begin_segment(softmax, segment, heads, wide);
        }
        for (int64_t kv = 0; kv < p.heads; kv++) {
            for (int64_t r = 0; r < count; r++) {
                const int64_t i = kv * RUNS + r;
                runs[i] = find(a, p, p.head + kv, t + r * RUN, room + i * 2 * RUN * a.pages.dim);
                if (r < more) {
                    runs[i].next_keys = key_of(a, next->row, next->head + kv, from + r * RUN);
                    runs[i].next_values = runs[i].next_keys + a.pages.value_offset;
                } else if (!next && soon.at) {
                    runs[i].next_keys = (const bf16*)soon.at + (kv * count + r) * RUN * a.pages.dim;
                    runs[i].next_values = runs[i].next_keys + p.heads * count * RUN * a.pages.dim;
                }
            }
            Run& last = runs[kv * RUNS + count - 1];
            late[kv] = last.next_values;
            last.next_values = last.values;
        }
        by_pages(a, p, t, [&](int64_t kv, int64_t r, int64_t n, int64_t h, int64_t at_once, bool first) {
            const bf16* q = a.q + (((p.head + kv) * a.tokens + token) * group + h - kv * group) * wide;
            OF_RUNS.score[first][at_once](a, q, runs + kv * RUNS + r, n, scores + h * SPAN + r * RUN);
            if (r + n == count)
                soften_span(softmax, h, at_once, count * RUN, p.begin - t, p.end - t, scores, weights,
                            first ? late[kv] : nullptr, RUN * a.pages.row / 32);
        });
        by_pages(a, p, t, [&](int64_t kv, int64_t r, int64_t n, int64_t h, int64_t at_once, bool first) {
            OF_RUNS.mix[first][at_once](a.pages, runs + kv * RUNS + r, n, weights + h * SPAN + r * RUN,
                                        (r ? softmax.ones : softmax.keep) + h, softmax.result.out + h * wide);
        });
        for (int64_t r = count; r < more; r++)
            for (int64_t kv = 0; kv < p.heads; kv++) {
                const bf16* keys = key_of(a, next->row, next->head + kv, from + r * RUN);
                ask_run(keys, a.pages.row);
                ask_run(keys + a.pages.value_offset, a.pages.row);
            }
        if (t + count * RUN < p.end && (t + count * RUN) % p.segment) continue;
        for (int64_t h = 0; h < heads; h++) softmax.result.total[h] = sum(load(softmax.sums + 16 * h));
        if (segment == other) join(whole, softmax.result, heads, wide);
    }
    if (p.partial) return;
    for (int64_t h = 0; h < heads; h++)
        finish(a, token, p.head * group + h, whole.most[h], whole.total[h], whole.out + h * wide);
}

static void merge(const Attention& a, const Piece& p, float* partials, int64_t count) {
    const int64_t wide = padded(a.pages.dim), heads = p.heads * a.group, floats = result_floats(heads, wide);
    const Result whole = result_at(partials, heads);
    for (int64_t i = 1; i < count; i++) join(whole, result_at(partials + i * floats, heads), heads, wide);
    for (int64_t h = 0; h < heads; h++)
        finish(a, a.offsets[p.row] + p.first, p.head * a.group + h, whole.most[h], whole.total[h], whole.out + h * wide);
}
