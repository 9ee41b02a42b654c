// See latent.h. Each `run` does one thread's share of the work.
#include "latent.h"

#include <algorithm>

namespace pdk {

Weights HeadProduct::of_head(int64_t head) const {
    const int64_t blocks = weights.blocks / heads, first = head * blocks;
    float* scale = weights.scale ? weights.scale + first * block_scales(weights) : nullptr;
    return {weights.format, blocks, weights.k, weights.data + first * block_bytes(weights),
            scale, nullptr, weights.group, weights.mins};
}

// Threads share blocks of tokens of all heads, and each prepares its own inputs.
void HeadProduct::run(Program& p, int thread) {
    const int64_t tokens = p.step.tokens, count = pieces(p);
    const int64_t in_width = p.buffers[in].width, out_width = p.buffers[out].width, wide = out_width / heads;
    int64_t begin, end;
    p.share(heads * count, thread, begin, end);
    for (int64_t i = begin; i < end; i++) {
        const int64_t head = i / count, row = i % count * OWN_ROWS, rows = std::min(OWN_ROWS, tokens - row);
        const Weights w = of_head(head);
        const Operand x = p.own(input_format(w.format), w.k, thread);
        const float* from = p.floats(in) + row * in_width + first + head / sharing * stride;
        p.kernels.prepare(from, in_width, columns, nullptr, 0.0f, x, 0, rows);
        const Output to{Store::write, p.floats(out) + row * out_width + head * wide, wide, out_width, {}};
        const Soon then = i + 1 < end ? Soon{of_head((i + 1) / count).data} : soon(p, thread);
        p.kernels.linear(w, x, rows, 0, w.blocks, to, then, p.scratch[thread]->as<uint8_t>());
    }
}

Soon HeadProduct::first_read(Program& p, int thread) const {
    const int64_t count = pieces(p);
    int64_t begin, end;
    p.share(heads * count, thread, begin, end);
    return begin == end ? soon(p, thread) : Soon{of_head(begin / count).data};
}

void PlaceLatents::run(Program& p, int thread) {
    int64_t first, last;
    p.share(p.step.tokens, thread, first, last);
    const HeadGroup& g = *p.groups[group];
    const pdk_heads& h = g.heads;
    const int64_t rank = p.buffers[absorbed].width / h.heads, rope = h.dim - rank;
    const Latents latents{p.floats(absorbed), p.floats(queries), p.floats(down), h.heads, rank,
                          p.buffers[queries].width / h.heads - rope, rope, g.half, g.cos.as<float>(), g.sin.as<float>(),
                          norm, eps, h.scale, pairs, p.q.as<bf16>()};
    p.kernels.place_latents(latents, p.pages_of(group, layer), p.write_pages(group), p.step.write_slots, first, last);
}

}  // namespace pdk
