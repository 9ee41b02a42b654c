// Between the projections of an MLA layer and attention: norm, rotation, and the write of latents. See level.cpp.
#pragma once

// The rotated part of a query or key, `rope` columns of x, times `scale`. See Pairs and Latents.
INLINE void turn_rope(const float* x, const Latents& l, const float* cos, const float* sin, float scale, float* out) {
    const bool beside = l.pairs != Pairs::halves, stays = l.pairs == Pairs::beside;
    for (int64_t d = 2 * l.half; d < l.rope; d++) out[d] = x[d] * scale;
    for (int64_t d = 0; d < l.half; d++) {
        const float a = (beside ? x[2 * d] : x[d]) * scale, b = (beside ? x[2 * d + 1] : x[l.half + d]) * scale;
        out[stays ? 2 * d : d] = a * cos[d] - b * sin[d];
        out[stays ? 2 * d + 1 : l.half + d] = b * cos[d] + a * sin[d];
    }
}

// Processes tokens [first, last).
static void place_latents(const Latents& l, const Pages& pages, const int64_t* write_pages, const int64_t* write_slots,
                          int64_t first, int64_t last) {
    const int64_t dim = l.rank + l.rope, wide = padded(dim), query = l.nope + l.rope;
    alignas(64) float turned[1024] = {};
    for (int64_t i = first; i < last; i++) {
        const float *cos = l.cos + i * l.half, *sin = l.sin + i * l.half;
        for (int64_t h = 0; h < l.heads; h++) {
            const float* absorbed = l.absorbed + (i * l.heads + h) * l.rank;
            for (int64_t d = 0; d < l.rank; d += 16)
                store_n(turned + d, load_n(absorbed + d, l.rank - d) * set1(l.scale), l.rank - d);
            turn_rope(l.queries + (i * l.heads + h) * query + l.nope, l, cos, sin, l.scale, turned + l.rank);
            narrow(turned, l.q + (i * l.heads + h) * wide, wide);
        }
        const float* down = l.down + i * dim;
        const F factor = set1(inverse_rms(down, l.rank, l.eps));
        for (int64_t d = 0; d < l.rank; d += 16) {
            const int64_t n = l.rank - d;
            store_n(turned + d, load_n(down + d, n) * factor * load_n(l.norm + d, n), n);
        }
        turn_rope(down + l.rank, l, cos, sin, 1.0f, turned + l.rank);
        narrow(turned, pages.base + write_pages[i] * pages.page_stride + write_slots[i] * dim, dim);
    }
}
