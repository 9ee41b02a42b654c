// Index keys and scores of sparse attention (DSA). See level.cpp.
//
// The scores of a tile of keys are the product of prompt chunks: keys are packed once for all query rows, which are
// ordered by token and then by head. The scores of a token's heads are added in the order of the heads, so a score has
// the same bits in any step.
#pragma once

// Processes tokens [first, last).
static void place_index(const IndexHeads& h, const Pages& pages, const int64_t* write_pages, const int64_t* write_slots,
                        int64_t first, int64_t last) {
    const int64_t dim = h.dim, wide = padded(dim), half = h.half;
    alignas(64) float turned[1024] = {}, key[1024], parts[1024];
    const auto turn_head = [&](const float* x, int64_t token) {
        if (h.beside) {
            for (int64_t d = 0; d < half; d++) parts[d] = x[2 * d], parts[half + d] = x[2 * d + 1];
            memcpy(parts + 2 * half, x + 2 * half, sizeof(float) * (dim - 2 * half));
            x = parts;
        }
        turn(x, dim, nullptr, half, h.cos + token * half, h.sin + token * half, 1.0f, turned);
    };
    for (int64_t i = first; i < last; i++) {
        for (int64_t q = 0; q < h.heads; q++) {
            turn_head(h.queries + (i * h.heads + q) * dim, i);
            narrow(turned, h.q + (i * h.heads + q) * wide, wide);
        }
        const float* x = h.keys + i * dim;
        F total = zero(), squares = zero();
        for (int64_t d = 0; d < dim; d += 16) total = total + load_n(x + d, dim - d);
        const F mean = set1(sum(total) / (float)dim);
        for (int64_t d = 0; d < dim; d += 16) {
            const F v = within(load_n(x + d, dim - d) - mean, zero(), 0, dim - d);
            squares = fma(v, v, squares);
        }
        const F factor = set1(1.0f / sqrtf(sum(squares) / (float)dim + h.eps));
        for (int64_t d = 0, n; d < dim; d += 16) {
            n = dim - d;
            store_n(key + d, fma((load_n(x + d, n) - mean) * factor, load_n(h.norm + d, n), load_n(h.bias + d, n)), n);
        }
        turn_head(key, i);
        narrow(turned, pages.base + write_pages[i] * pages.page_stride + write_slots[i] * dim, dim);
    }
}

// scores[(query - p.first) * stride + key] = the sum over heads of weight * scale * max(0, q k), for the queries and
// keys of a piece. `weights` [queries][heads]. Writes behind the last key up to a multiple of 32.
static void index_scores(const Attention& a, const Piece& p, const float* weights, float scale, float* scores,
                         int64_t stride, uint8_t* scratch) {
    const int64_t wide = padded(a.pages.dim), heads = a.group, rows = (p.last - p.first) * heads;
    const bf16* q = a.q + (a.offsets[p.row] + p.first) * heads * wide;
    const Scratch s = carve(scratch, 0, wide);
    const QueryMultiplier multiplier((rows - 1) / ((rows - 1) / MAX_QUERY_ROWS + 1) + 1);
    for (int64_t t = p.begin; t < p.end; t += TILE_KEYS) {
        const int64_t count = p.end - t < TILE_KEYS ? padded(p.end - t) : TILE_KEYS;
        pack<false>(a, p, t, count, s);
        by_tiles(rows, MAX_QUERY_ROWS, true, [&](int64_t r, int64_t n, int64_t) {
            multiplier.score(s.keys, wide, count, q + r * wide, n, s.scores);
            for (int64_t i = 0; i < n; i++) {
                const bool begins = (r + i) % heads == 0;
                const F weight = set1(weights[r + i] * scale);
                float* to = scores + (r + i) / heads * stride + t;
                for (int64_t g = 0; g < count; g += 16) {
                    const F product = max(load(s.scores + i * TILE_KEYS + g), zero());
                    store(to + g, fma(product, weight, begins ? zero() : load(to + g)));
                }
            }
        });
    }
}
