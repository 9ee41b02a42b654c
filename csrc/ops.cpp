// See ops.h. Each `run` does one thread's share of the work.
#include "ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "sparse.h"

namespace pdk {

void Embed::run(Program& p, int thread) {
    int64_t first, last;
    p.share(p.step.tokens, thread, first, last);
    for (int64_t i = first; i < last; i++)
        p.kernels.widen(rows + p.step.ids[i] * width, scale, p.floats(out) + i * width, width);
}

static float wide_of(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

void EmbedPacked::run(Program& p, int thread) {
    const Weights& w = weights;
    const bool four = w.format == Format::group4;
    const int64_t group = is_grouped(w.format) ? w.group : w.k, wide = w.mins ? 2 * BLOCK : BLOCK, quad = four ? 64 : 128;
    const float middle = four ? 8.0f : 128.0f;
    int64_t first, last;
    p.share(p.step.tokens, thread, first, last);
    for (int64_t i = first; i < last; i++) {
        const int64_t block = p.step.ids[i] / BLOCK, lane = p.step.ids[i] % BLOCK;
        float* to = p.floats(out) + i * width;
        if (w.format == Format::bf16) {
            const bf16* half = reinterpret_cast<const bf16*>(w.data) + block * w.k * BLOCK + lane * 2;
            for (int64_t q = 0; q < width; q++) to[q] = wide_of(half[q / 2 * 64 + q % 2]) * scale;
            continue;
        }
        const uint8_t* data = w.data + block * block_bytes(w) + (four ? lane % 16 : lane) * 4;
        const float* scales = w.scale + block * block_scales(w) + lane;
        for (int64_t q = 0; q < width; q++) {
            const uint8_t byte = data[q / 4 * quad + q % 4];
            const float value = four ? (lane < 16 ? byte & 15 : byte >> 4) : byte;
            const float* s = scales + q / group * wide;
            to[q] = scale * (w.mins ? s[0] * value + s[BLOCK] : s[0] * (value - middle));
        }
    }
}

void Angles::run(Program& p, int thread) {
    int64_t first, last;
    p.share(p.step.tokens, thread, first, last);
    const int64_t half = static_cast<int64_t>(inverse.size());
    float *cos = p.groups[group]->cos.as<float>(), *sin = p.groups[group]->sin.as<float>();
    for (int64_t i = first; i < last; i++) {
        const float position = static_cast<float>(p.step.positions[i]);
        for (int64_t d = 0; d < half; d++) {
            const float angle = position * inverse[d];
            cos[i * half + d] = std::cos(angle) * factor;
            sin[i * half + d] = std::sin(angle) * factor;
        }
    }
}

void Product::run(Program& p, int thread) {
    const int64_t rows = p.count(of_samples);
    if (rows == 0) return;
    const Format format = input_format(weights.format);
    const int64_t k = weights.k;
    Operand x = p.gated(format, k);
    const bool adapted = p.lora.changes(site);
    bool meets = adapted;
    if (adapted) p.lora.lower(p, site, source, x, thread);
    if (source.buffer >= 0) {
        const bool alone = rows <= OWN_ROWS;
        x = alone ? p.own(format, k, thread) : p.shared(format, k);
        int64_t first = 0, last = rows;
        if (!alone) p.share(rows, thread, first, last);
        p.kernels.prepare(p.floats(source.buffer), source.width, source.width, source.norm, source.eps, x, first, last);
        meets |= !alone;
    }
    if (meets) p.pool.meet();
    int64_t first, last;
    share(p, thread, first, last);
    Output to{store, nullptr, columns, columns, {}, scale, activation.act, activation.limit};
    if (store == Store::gated) to.next = p.gated(format, weights.blocks / 2 * BLOCK);
    else to.to = p.floats(out);
    if (adapted) change(p, thread, x, first, last, to);
    else p.kernels.linear(weights, x, rows, first, last, to, soon(p, thread), p.scratch[thread]->as<uint8_t>());
}

void Product::change(Program& p, int thread, const Operand& x, int64_t first, int64_t last, const Output& to) const {
    const int64_t wide = store == Store::gated ? 2 : 1;
    const std::vector<TokenRange>& ranges = p.lora.ranges();
    for (const TokenRange& range : ranges) {
        Output part = to;
        if (store == Store::gated) part.next = from(to.next, range.first);
        else part.to = to.to + range.first * to.stride;
        p.lora.change(p, site, range, weights.blocks, wide * first, wide * last, part, thread);
        const Soon then = &range == &ranges.back() ? soon(p, thread) : Soon{};
        p.kernels.linear(weights, from(x, range.first), range.count, first, last, part, then,
                         p.scratch[thread]->as<uint8_t>());
    }
}

void Product::share(Program& p, int thread, int64_t& first, int64_t& last) const {
    p.share(store == Store::gated ? weights.blocks / 2 : weights.blocks, thread, first, last);
}

Soon Product::first_read(Program& p, int thread) const {
    if (p.count(of_samples) == 0) return soon(p, thread);
    int64_t first, last;
    share(p, thread, first, last);
    if (first == last) return {};
    return {weights.data + (store == Store::gated ? 2 : 1) * first * block_bytes(weights)};
}

void Norm::run(Program& p, int thread) {
    int64_t first, last;
    p.share(p.count(p.buffers[out].of_samples), thread, first, last);
    p.kernels.norm(p.floats(in), p.buffers[in].width, weight, eps, p.buffers[out].room->as<bf16>(), first, last);
}

void Place::run(Program& p, int thread) {
    int64_t first, last;
    p.share(p.step.tokens, thread, first, last);
    const HeadGroup& g = *p.groups[group];
    const pdk_heads& h = g.heads;
    const Heads heads{p.floats(qkv), p.buffers[qkv].width, h.heads, h.kv_heads, h.dim, p.step.tokens, g.half,
                      g.cos.as<float>(), g.sin.as<float>(), q_norm, k_norm, whole, eps, h.scale, p.q.as<bf16>()};
    p.kernels.place(heads, p.pages_of(group, layer), p.write_pages(group), p.step.write_slots, first, last);
}

// Computes a decode piece of `plan`; see Kernels::decode for what is prefetched.
static void decode(Program& p, Plan& plan, const Attention& a, const Planned& planned, Piece piece, bool fresh,
                   const Piece* then, const Soon& soon) {
    if (planned.split < 0) {
        p.kernels.decode(a, piece, fresh, then, soon);
        return;
    }
    const Split& split = plan.splits[planned.split];
    float* all = p.partials.as<float>() + split.first_partial * plan.partial_floats;
    piece.partial = all + planned.partial * plan.partial_floats;
    p.kernels.decode(a, piece, fresh, then, soon);
    const int32_t ended = plan.done[planned.split].fetch_add(1, std::memory_order_acq_rel) + 1;
    if (ended % split.pieces == 0) p.kernels.merge(a, piece, all, split.partials);
}

void Attend::run(Program& p, int thread) {
    Attention a = p.attention_of(group, layer);
    a.mask = mask;
    a.out = p.floats(out);
    Plan& plan = p.groups[group]->plan_for(sight());
    const int64_t count = static_cast<int64_t>(plan.pieces.size());
    const Piece* expected = nullptr;
    for (int64_t i; turns.take(thread, count, i);) {
        const Planned& planned = plan.pieces[i];
        const int64_t query = query_of(p, planned.piece);
        if (query >= 0) {
            const Gathered own(p, a, planned.piece, selection->tokens_of(query), thread);
            if (planned.decodes) decode(p, plan, own.attention, planned, own.piece, true, nullptr, {});
            else p.kernels.extend(own.attention, own.piece, p.scratch[thread]->as<uint8_t>());
            continue;
        }
        if (!planned.decodes) {
            p.kernels.extend(a, planned.piece, p.scratch[thread]->as<uint8_t>());
            continue;
        }
        const bool fresh = expected != &planned.piece;
        const Planned* behind = i + p.pool.size() < count ? &plan.pieces[i + p.pool.size()] : nullptr;
        expected = behind && behind->decodes && query_of(p, behind->piece) < 0 ? &behind->piece : nullptr;
        decode(p, plan, a, planned, planned.piece, fresh, expected, behind ? Soon{} : soon(p, thread));
    }
}

Soon Attend::first_read(Program& p, int thread) const {
    const Plan& plan = p.groups[group]->plan_for(sight());
    if (thread >= static_cast<int64_t>(plan.pieces.size())) return {};
    const Piece& piece = plan.pieces[thread].piece;
    const Attention a = p.attention_of(group, layer);
    const int64_t page = (a.table + piece.row * a.table_stride)[piece.begin / a.pages.page_tokens];
    const int64_t head = piece.head * a.pages.page_tokens + piece.begin % a.pages.page_tokens;
    return {reinterpret_cast<const uint8_t*>(a.pages.base + page * a.pages.page_stride + head * a.pages.row)};
}

// Calls call(row, first column, last column) for the thread's share. Threads share 16-column pieces of all rows, so
// that few rows keep all of them busy.
template <class Call>
static void by_columns(Program& p, int thread, int64_t buffer, Call&& call) {
    const int64_t width = p.buffers[buffer].width, pieces = (width + 15) / 16;
    int64_t at, last;
    p.share(p.count(p.buffers[buffer].of_samples) * pieces, thread, at, last);
    for (int64_t end; at < last; at = end) {
        const int64_t row = at / pieces, c = at % pieces * 16;
        end = std::min(last, (row + 1) * pieces);
        call(row, c, std::min(width, c + (end - at) * 16));
    }
}

void Sigmoid::run(Program& p, int thread) {
    const int64_t width = p.buffers[in].width, stride = p.buffers[gates].width;
    by_columns(p, thread, out, [&](int64_t row, int64_t c, int64_t end) {
        const float* gate = p.floats(gates) + row * stride + first;
        p.kernels.sigmoid(p.floats(in) + row * width + c, wide == 1 ? gate : gate + c, wide == 1, end - c,
                          p.floats(out) + row * width + c, add);
    });
}

void AddRows::run(Program& p, int thread) {
    const int64_t width = p.buffers[in].width;
    by_columns(p, thread, out, [&](int64_t row, int64_t c, int64_t end) {
        p.kernels.add(p.floats(in) + row * width, width, norm, eps, scale, p.floats(out) + row * width, c, end);
    });
}

void Cap::run(Program& p, int thread) {
    const int64_t rows = p.count(p.buffers[buffer].of_samples), width = p.buffers[buffer].width;
    int64_t first, last;
    p.share(padded(width) / BLOCK, thread, first, last);
    first *= BLOCK;
    last = std::min(width, last * BLOCK);
    for (int64_t i = 0; i < rows && first < last; i++)
        p.kernels.cap(p.floats(buffer) + i * width + first, last - first, scale, softcap);
}

void Select::run(Program& p, int thread) {
    int64_t first, last;
    p.share(p.step.samples, thread, first, last);
    const int64_t width = p.buffers[in].width;
    for (int64_t i = first; i < last; i++)
        std::memcpy(p.floats(out) + i * width, p.floats(in) + p.step.sample_index[i] * width, width * sizeof(float));
}

void Argmax::run(Program& p, int thread) {
    const int64_t samples = p.step.samples, width = p.buffers[in].width, blocks = padded(width) / BLOCK;
    int64_t first, last;
    p.share(blocks, thread, first, last);
    first *= BLOCK;
    last = std::min(width, last * BLOCK);
    for (int64_t i = 0; i < samples; i++) {
        const float* row = p.floats(in) + i * width;
        found[thread * samples + i] = first < last ? first + p.kernels.argmax(row + first, last - first) : 0;
    }
    p.pool.meet();
    p.share(samples, thread, first, last);
    for (int64_t i = first; i < last; i++) {
        const float* row = p.floats(in) + i * width;
        int64_t best = found[i];
        for (int t = 1; t < p.pool.size(); t++) {
            const int64_t other = found[t * samples + i];
            if (row[other] > row[best] || (std::isnan(row[best]) && !std::isnan(row[other]))) best = other;
        }
        p.buffers[out].room->as<int64_t>()[i] = best;
    }
}

}  // namespace pdk
