// Between the q/k/v projection and attention: head norms, rotation, and the KV write to pages. See level.cpp.
#pragma once

// One head of `dim`: times `scale`, and times `norm` if it is not null; its first 2 * half columns are rotated by the
// angles. x and out must not overlap.
INLINE void turn(const float* x, int64_t dim, const float* norm, int64_t half, const float* cos, const float* sin,
                 float scale, float* out) {
    const F factor = set1(scale);
    for (int64_t d = 0; d < half; d += 16) {
        const int64_t n = half - d;
        F a = load_n(x + d, n) * factor, b = load_n(x + half + d, n) * factor;
        if (norm) {
            a = a * load_n(norm + d, n);
            b = b * load_n(norm + half + d, n);
        }
        F c = load_n(cos + d, n), s = load_n(sin + d, n);
        store_n(out + d, a * c - b * s, n);
        store_n(out + half + d, fma(b, c, a * s), n);
    }
    for (int64_t d = 2 * half; d < dim; d += 16) {
        F a = load_n(x + d, dim - d) * factor;
        store_n(out + d, norm ? a * load_n(norm + d, dim - d) : a, dim - d);
    }
}

INLINE void narrow(const float* x, bf16* out, int64_t n) {
    for (int64_t d = 0; d < n; d += 16) store_half_n(out + d, load_n(x + d, n - d), n - d);
}

// Processes tokens [first, last).
static void place(const Heads& h, const Pages& pages, const int64_t* write_pages, const int64_t* write_slots,
                  int64_t first, int64_t last) {
    const int64_t dim = h.dim, wide = padded(dim), group = h.heads / h.kv_heads;
    alignas(64) float turned[1024] = {};
    for (int64_t i = first; i < last; i++) {
        const float *x = h.qkv + i * h.stride, *keys = x + h.heads * dim;
        const float of_q = h.q_norm && h.whole ? inverse_rms(x, h.heads * dim, h.eps) : 1.0f;
        const float of_k = h.k_norm && h.whole ? inverse_rms(keys, h.kv_heads * dim, h.eps) : 1.0f;
        const float *cos = h.cos + i * h.half, *sin = h.sin + i * h.half;
        for (int64_t q = 0; q < h.heads; q++) {
            const float* own = h.q_norm && h.whole ? h.q_norm + q * dim : h.q_norm;
            const float scale = h.q_norm ? h.scale * (h.whole ? of_q : inverse_rms(x + q * dim, dim, h.eps)) : h.scale;
            turn(x + q * dim, dim, own, h.half, cos, sin, scale, turned);
            narrow(turned, h.q + (((q / group) * h.tokens + i) * group + q % group) * wide, wide);
        }
        for (int64_t k = 0; k < h.kv_heads; k++) {
            bf16* to =
                pages.base + write_pages[i] * pages.page_stride + (k * pages.page_tokens + write_slots[i]) * pages.row;
            const float *from = keys + k * dim, *value = keys + (h.kv_heads + k) * dim;
            const float* own = h.k_norm && h.whole ? h.k_norm + k * dim : h.k_norm;
            const float scale = h.k_norm ? (h.whole ? of_k : inverse_rms(from, dim, h.eps)) : 1.0f;
            turn(from, dim, own, h.half, cos, sin, scale, turned);
            if (pages.format != KVFormat::bf16) {
                store_codes(turned, dim, pages.format, to);
                store_codes(value, dim, pages.format, to + pages.value_offset);
                continue;
            }
            narrow(turned, to, dim);
            narrow(value, to + pages.value_offset, dim);
        }
    }
}
