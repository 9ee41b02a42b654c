// See sparse.h. Each `run` does one thread's share of the work.
#include "sparse.h"

#include <algorithm>
#include <cstring>

namespace pdk {
namespace {

constexpr int64_t LINE = 64, AHEAD = 8;  // bytes of a cache line; tokens that are prefetched before they are copied

int64_t extend_bytes(int64_t group, int64_t dim) { return (extend_scratch_bytes(group, dim) + LINE - 1) / LINE * LINE; }

const bf16* row_of(const Attention& a, int64_t row, int64_t token) {
    const int64_t page = (a.table + row * a.table_stride)[token / a.pages.page_tokens];
    return a.pages.base + page * a.pages.page_stride + token % a.pages.page_tokens * a.pages.row;
}

}  // namespace

void PlaceIndex::run(Program& p, int thread) {
    int64_t first, last;
    p.share(p.step.tokens, thread, first, last);
    const HeadGroup& g = *p.groups[group];
    const pdk_heads& h = g.heads;
    const IndexHeads heads{p.floats(queries), p.floats(keys), h.heads, h.dim, g.half, g.cos.as<float>(),
                           g.sin.as<float>(), norm, bias, eps, beside, p.q.as<bf16>()};
    p.kernels.place_index(heads, p.pages_of(group, layer), p.write_pages(group), p.step.write_slots, first, last);
}

// Threads share the pieces of a batch, then its queries.
void SelectTokens::run(Program& p, int thread) {
    const Attention a = p.attention_of(group, layer);
    const int64_t heads = p.groups[group]->heads.heads;
    for (const QueryBatch& batch : selection->batches) {
        int64_t first, last;
        p.share(static_cast<int64_t>(batch.pieces.size()), thread, first, last);
        for (int64_t i = first; i < last; i++) {
            const Scored& s = batch.pieces[i];
            const Piece piece{s.row, 0, 1, s.first, s.last, s.begin, s.end, nullptr, false, 0};
            const float* of_heads = p.floats(weights) + (a.offsets[s.row] + s.first) * heads;
            p.kernels.index_scores(a, piece, of_heads, scale, selection->scores_of(s.line), selection->stride(),
                                   p.scratch[thread]->as<uint8_t>());
        }
        p.pool.meet();
        p.share(batch.last - batch.first, thread, first, last);
        for (int64_t i = first; i < last; i++) selection->choose(batch.first + i, selection->scores_of(i));
        if (&batch != &selection->batches.back()) p.pool.meet();
    }
}

Gathered::Gathered(Program& p, const Attention& a, const Piece& whole, const int32_t* tokens, int thread)
    : attention(a), piece(whole), start_(whole.end - 1), end_(whole.end), offset_(a.offsets[whole.row] + whole.first) {
    const int64_t row = a.pages.row, bytes = row * static_cast<int64_t>(sizeof(bf16));
    bf16* to = reinterpret_cast<bf16*>(p.scratch[thread]->as<uint8_t>() + extend_bytes(a.group, a.pages.dim));
    for (int64_t i = whole.begin; i < whole.end; i++) {
        if (i + AHEAD < whole.end) {
            const bf16* next = row_of(a, whole.row, tokens[i + AHEAD]);
            for (int64_t c = 0; c < row; c += LINE / static_cast<int64_t>(sizeof(bf16))) __builtin_prefetch(next + c);
        }
        std::memcpy(to + i * row, row_of(a, whole.row, tokens[i]), bytes);
    }
    attention.pages.base = to;
    attention.pages.page_stride = attention.pages.value_offset = 0;
    attention.pages.page_tokens = padded(whole.end);
    attention.starts = &start_, attention.ends = &end_, attention.offsets = &offset_;
    attention.table = &page_, attention.table_stride = 0;
    piece.row = piece.head = piece.first = 0;
    piece.last = 1;
}

int64_t Gathered::scratch_bytes(const pdk_heads& heads, int64_t top_k) {
    const int64_t row = row_items(static_cast<KVFormat>(heads.kv_format), heads.dim);
    return extend_bytes(heads.heads / heads.kv_heads, heads.dim) + top_k * row * static_cast<int64_t>(sizeof(bf16));
}

}  // namespace pdk
