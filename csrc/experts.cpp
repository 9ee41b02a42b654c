// See experts.h. Each `run` does one thread's share of the work.
#include "experts.h"

#include <algorithm>
#include <cmath>

namespace pdk {
namespace {

constexpr int64_t LOAD = 6;  // loading a block of weights takes about as long as multiplying this many rows with it

// Returns the weights of one of `count` experts.
Weights of_expert(const Weights& w, int64_t expert, int64_t count) {
    const int64_t blocks = w.blocks / count, first = expert * blocks;
    float* scale = w.scale ? w.scale + first * block_scales(w) : nullptr;
    float* bias = w.bias ? w.bias + first * BLOCK : nullptr;
    return {w.format, blocks, w.k, w.data + first * block_bytes(w), scale, bias, w.group, w.mins};
}

// Returns where the first block of a part begins; `wide` is the number of blocks that count as one.
Soon block_of(const Weights& w, const Part& part, int64_t count, int64_t wide) {
    const Weights own = of_expert(w, part.expert, count);
    return {own.data + wide * part.begin * block_bytes(own)};
}

int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Writes the indices of the `most` largest of x [count] to `best`, largest first. Ties go to the lower index; NaN ranks
// last.
void largest(const float* x, int64_t count, int64_t most, int64_t* best) {
    const auto above = [&](int64_t a, int64_t b) { return x[a] > x[b] || (std::isnan(x[b]) && !std::isnan(x[a])); };
    for (int64_t e = 0, found = 0; e < count; e++) {
        if (found == most && !above(e, best[most - 1])) continue;
        int64_t at = found < most ? found++ : most - 1;
        for (; at > 0 && above(e, best[at - 1]); at--) best[at] = best[at - 1];
        best[at] = e;
    }
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Returns the sum of the two largest of x [count], or its largest without `two`.
float best_of(const float* x, int64_t count, bool two) {
    float first = -INFINITY, second = -INFINITY;
    for (int64_t e = 0; e < count; e++) {
        if (x[e] > first) second = first, first = x[e];
        else if (x[e] > second) second = x[e];
    }
    return two && count > 1 ? first + second : first;
}

}  // namespace

void Route::score(const float* x, int64_t count, float* scores, float* choice, float* of_groups) const {
    if (how.sigmoid) {
        for (int64_t e = 0; e < count; e++) scores[e] = sigmoid(x[e]);
    } else {
        float most = -INFINITY, total = 0.0f;
        for (int64_t e = 0; e < count; e++) most = std::fmax(most, x[e]);
        for (int64_t e = 0; e < count; e++) total += scores[e] = std::exp(x[e] - most);
        for (int64_t e = 0; e < count; e++) scores[e] /= total;
    }
    for (int64_t e = 0; e < count; e++) choice[e] = how.correction ? scores[e] + how.correction[e] : scores[e];
    if (how.groups == 1) return;
    const int64_t size = count / how.groups;
    for (int64_t g = 0; g < how.groups; g++) of_groups[g] = best_of(choice + g * size, size, how.sigmoid);
    for (int64_t left = how.top_groups; left > 0; left--) {  // a chosen group has the score NaN
        int64_t best = 0;
        for (int64_t g = 1; g < how.groups; g++)
            if (std::isnan(of_groups[best]) || of_groups[g] > of_groups[best]) best = g;
        of_groups[best] = NAN;
    }
    for (int64_t e = 0; e < count; e++)
        if (!std::isnan(of_groups[e / size])) choice[e] = -INFINITY;
}

void Route::run(Program& p, int thread) {
    const int64_t count = p.buffers[logits].width, top_k = how.top_k;
    float* scratch = p.scratch[thread]->as<float>();
    float *scores = scratch, *choice = scratch + count;
    int64_t first, last;
    p.share(p.count(p.buffers[logits].of_samples), thread, first, last);
    for (int64_t i = first; i < last; i++) {
        const float* x = p.floats(logits) + i * count;
        int64_t* best = p.buffers[experts].room->as<int64_t>() + i * top_k;
        float* weight = p.floats(weights) + i * top_k;
        float total = 0.0f;
        if (how.plain()) {
            largest(x, count, top_k, best);
            for (int64_t j = 0; j < top_k; j++)
                weight[j] = how.sigmoid ? sigmoid(x[best[j]]) : std::exp(x[best[j]] - x[best[0]]);
        } else {
            score(x, count, scores, choice, choice + count);
            largest(choice, count, top_k, best);
            for (int64_t j = 0; j < top_k; j++) weight[j] = scores[best[j]];
        }
        if (how.normalise)
            for (int64_t j = 0; j < top_k; j++) total += weight[j];
        else if (how.sigmoid || !how.plain()) total = 1.0f;
        else
            for (int64_t e = 0; e < count; e++) total += std::exp(x[e] - x[best[0]]);
        if (how.sigmoid && how.normalise) total += 1e-20f;
        for (int64_t j = 0; j < top_k; j++) weight[j] = weight[j] / total * how.scale;
    }
}

void Experts::prepare_for(Program& p) {
    Routed& r = p.routed;
    const int64_t rows = routes(p);
    r.starts.resize(std::max<size_t>(r.starts.size(), mixture.count + 1));
    r.tokens.resize(std::max<size_t>(r.tokens.size(), rows));
    r.places.resize(std::max<size_t>(r.places.size(), rows));
    r.inputs.reserve(Program::operand_bytes(rows, mixture.gate_up.k));
    r.gated.reserve(Program::operand_bytes(rows, mixture.down.k));
    r.outputs.reserve(static_cast<size_t>(rows) * p.buffers[out].width * sizeof(float));
}

void Experts::sort(Program& p) const {
    Routed& r = p.routed;
    const int64_t top_k = p.buffers[experts].width, rows = routes(p);
    const int64_t* expert = p.buffers[experts].room->as<int64_t>();
    std::fill(r.starts.begin(), r.starts.begin() + mixture.count + 1, 0);
    for (int64_t i = 0; i < rows; i++) r.starts[expert[i]]++;
    if (mixture.counts)
        for (int64_t e = 0; e < mixture.count; e++) mixture.counts[e] += r.starts[e];
    int64_t end = 0;
    for (int64_t e = 0; e <= mixture.count; e++) r.starts[e] = end += r.starts[e];  // end of each expert's routes
    for (int64_t i = rows - 1; i >= 0; i--) {
        const int64_t at = --r.starts[expert[i]];  // becomes the begin of the expert's routes
        r.tokens[at] = i / top_k;
        r.places[i] = at;
    }
}

// Calls call(part, the next part or null) for this thread's share of all experts that have rows.
template <class Call>
void Experts::share_blocks(const Program& p, int thread, int64_t blocks, Call&& call) const {
    const std::vector<int64_t>& starts = p.routed.starts;
    const auto cost = [&](int64_t e) { return starts[e + 1] > starts[e] ? LOAD + starts[e + 1] - starts[e] : 0; };
    int64_t total = 0, low, high, before = 0;
    for (int64_t e = 0; e < mixture.count; e++) total += cost(e) * blocks;
    p.share(total, thread, low, high);
    Part last{};  // a part whose successor is not known yet; no blocks: none
    for (int64_t e = 0; e < mixture.count; before += cost(e++) * blocks) {
        if (cost(e) == 0) continue;
        const int64_t begin = std::clamp<int64_t>(up(std::max<int64_t>(low - before, 0), cost(e)), 0, blocks);
        const int64_t end = std::clamp<int64_t>(up(std::max<int64_t>(high - before, 0), cost(e)), 0, blocks);
        if (begin == end) continue;
        const Part part{e, starts[e], starts[e + 1] - starts[e], begin, end};
        if (last.end) call(last, &part);
        last = part;
    }
    if (last.end) call(last, nullptr);
}

void Experts::run(Program& p, int thread) {
    const int64_t rows = routes(p), width = p.buffers[out].width, top_k = p.buffers[experts].width;
    if (rows == 0) return;
    const Routed& r = p.routed;
    const Weights &wide = mixture.gate_up, &deep = mixture.down;
    const Operand inputs = Program::operand(r.inputs, input_format(wide.format), rows, wide.k);
    const Operand gated = Program::operand(r.gated, input_format(deep.format), rows, deep.k);
    float* outputs = r.outputs.as<float>();
    uint8_t* scratch = p.scratch[thread]->as<uint8_t>();
    int64_t first, last;
    if (thread == 0) sort(p);
    p.pool.meet();
    p.share(rows, thread, first, last);
    for (int64_t i = first; i < last; i++)
        p.kernels.prepare(p.floats(source.buffer) + r.tokens[i] * source.width, source.width, source.width, source.norm,
                          source.eps, from(inputs, i), 0, 1);
    p.pool.meet();
    share_blocks(p, thread, wide.blocks / mixture.count / 2, [&](const Part& part, const Part* then) {
        const Output to{Store::gated, nullptr, deep.k, deep.k, from(gated, part.row), 1.0f, mixture.activation.act,
                        mixture.activation.limit};
        const Weights w = of_expert(wide, part.expert, mixture.count);
        const Soon soon = then ? block_of(wide, *then, mixture.count, 2) : Soon{};
        p.kernels.linear(w, from(inputs, part.row), part.rows, part.begin, part.end, to, soon, scratch);
    });
    p.pool.meet();
    share_blocks(p, thread, deep.blocks / mixture.count, [&](const Part& part, const Part* then) {
        const Output to{Store::write, outputs + part.row * width, width, width, {}};
        const Weights w = of_expert(deep, part.expert, mixture.count);
        const Soon soon = then ? block_of(deep, *then, mixture.count, 1) : Op::soon(p, thread);
        p.kernels.linear(w, from(gated, part.row), part.rows, part.begin, part.end, to, soon, scratch);
    });
    p.pool.meet();
    p.share(tokens(p), thread, first, last);
    for (int64_t i = first; i < last; i++)
        p.kernels.mix(outputs, width, r.places.data() + i * top_k, p.floats(weights) + i * top_k, top_k,
                      p.floats(out) + i * width, add);
}

}  // namespace pdk
