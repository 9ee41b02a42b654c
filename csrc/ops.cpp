// See ops.h. Each `run` does one thread's share of the work.
#include "ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace pdk {

void Embed::run(Program& p, int thread) {
    int64_t first, last;
    p.share(p.step.tokens, thread, first, last);
    for (int64_t i = first; i < last; i++)
        p.kernels.widen(rows + p.step.ids[i] * width, p.floats(out) + i * width, width);
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
    const Format format = weights.format;
    const int64_t k = weights.k;
    Operand x = p.gated(format, k);
    if (source.buffer >= 0) {
        const bool alone = rows <= OWN_ROWS;
        x = alone ? p.own(format, k, thread) : p.shared(format, k);
        int64_t first = 0, last = rows;
        if (!alone) p.share(rows, thread, first, last);
        p.kernels.prepare(p.floats(source.buffer), source.width, source.width, source.norm, source.eps, x, first, last);
        if (!alone) p.pool.meet();
    }
    int64_t first, last;
    share(p, thread, first, last);
    Output to{store, nullptr, columns, columns, {}};
    if (store == Store::swiglu) to.next = p.gated(format, weights.blocks / 2 * BLOCK);
    else to.to = p.floats(out);
    p.kernels.linear(weights, x, rows, first, last, to, soon(p, thread));
}

void Product::share(Program& p, int thread, int64_t& first, int64_t& last) const {
    p.share(store == Store::swiglu ? weights.blocks / 2 : weights.blocks, thread, first, last);
}

Soon Product::first_read(Program& p, int thread) const {
    if (p.count(of_samples) == 0) return soon(p, thread);
    int64_t first, last;
    share(p, thread, first, last);
    if (first == last) return {};
    return {weights.data + (store == Store::swiglu ? 2 : 1) * first * block_bytes(weights)};
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
                      g.cos.as<float>(), g.sin.as<float>(), q_norm, k_norm, eps, h.scale, p.q.as<bf16>()};
    p.kernels.place(heads, p.pages_of(group, layer), p.write_pages(group), p.step.write_slots, first, last);
}

void Attend::run(Program& p, int thread) {
    Attention a = p.attention_of(group, layer);
    a.mask = mask;
    a.out = p.floats(out);
    Plan& plan = p.groups[group]->plan_for(mask.window);
    const int64_t count = static_cast<int64_t>(plan.pieces.size());
    const Piece* expected = nullptr;
    for (int64_t i; turns.take(thread, count, i);) {
        const Planned& planned = plan.pieces[i];
        Piece piece = planned.piece;
        if (!planned.decodes) {
            p.kernels.extend(a, piece, p.scratch[thread]->as<uint8_t>());
            continue;
        }
        const bool fresh = expected != &planned.piece;
        const Planned* behind = i + p.pool.size() < count ? &plan.pieces[i + p.pool.size()] : nullptr;
        expected = behind && behind->decodes ? &behind->piece : nullptr;
        const Soon then = behind ? Soon{} : soon(p, thread);
        if (planned.split < 0) {
            p.kernels.decode(a, piece, fresh, expected, then);
            continue;
        }
        const Split& split = plan.splits[planned.split];
        float* all = p.partials.as<float>() + split.first_partial * plan.partial_floats;
        piece.partial = all + planned.partial * plan.partial_floats;
        p.kernels.decode(a, piece, fresh, expected, then);
        const int32_t ended = plan.done[planned.split].fetch_add(1, std::memory_order_acq_rel) + 1;
        if (ended % split.pieces == 0) p.kernels.merge(a, piece, all, split.partials);
    }
}

Soon Attend::first_read(Program& p, int thread) const {
    const Plan& plan = p.groups[group]->plan_for(mask.window);
    if (thread >= static_cast<int64_t>(plan.pieces.size())) return {};
    const Piece& piece = plan.pieces[thread].piece;
    const Attention a = p.attention_of(group, layer);
    const int64_t page = (a.table + piece.row * a.table_stride)[piece.begin / a.pages.page_tokens];
    const int64_t head = piece.head * a.pages.page_tokens + piece.begin % a.pages.page_tokens;
    return {reinterpret_cast<const uint8_t*>(a.pages.base + page * a.pages.page_stride + head * a.pages.row)};
}

// Threads share 16-column pieces of all rows, so that few rows keep all of them busy.
void Sigmoid::run(Program& p, int thread) {
    const int64_t width = p.buffers[in].width, pieces = (width + 15) / 16, stride = p.buffers[gates].width;
    int64_t at, last;
    p.share(p.count(p.buffers[out].of_samples) * pieces, thread, at, last);
    for (int64_t end; at < last; at = end) {
        const int64_t row = at / pieces, c = at % pieces * 16;
        end = std::min(last, (row + 1) * pieces);
        const int64_t columns = std::min(width - c, (end - at) * 16);
        const float* gate = p.floats(gates) + row * stride + first;
        p.kernels.sigmoid(p.floats(in) + row * width + c, wide == 1 ? gate : gate + c, wide == 1, columns,
                          p.floats(out) + row * width + c, add);
    }
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
