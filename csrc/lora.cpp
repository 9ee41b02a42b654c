// See lora.h.
#include "lora.h"

#include <algorithm>
#include <cstring>

#include "ops.h"

namespace pdk {
namespace {

constexpr int64_t RANGE = 256;  // tokens whose changes are kept at a time
constexpr int64_t PIECE = 64;   // most tokens of a piece
constexpr int64_t TILE = 16;    // larger pieces are multiples of it

Weights half_weights(const void* data, int64_t blocks, int64_t k) {
    return {Format::bf16, blocks, k, static_cast<uint8_t*>(const_cast<void*>(data)), nullptr, nullptr, 0, false};
}

Operand half_operand(void* at, int64_t k) { return {Format::bf16, k, static_cast<bf16*>(at), nullptr, nullptr, nullptr}; }

// Returns the number of tokens of the pieces that a part of `count` tokens is cut into for `threads` threads.
int64_t piece_of(int64_t count, int64_t threads) {
    int64_t size = (count + threads - 1) / threads;
    if (size > TILE) size = (size + TILE - 1) / TILE * TILE;
    return std::min(size, PIECE);
}

}  // namespace

Lora::Lora(int threads) : threads_(threads), low_(std::make_unique<Room>()), changes_(std::make_unique<Room>()) {
    for (int t = 0; t < threads; t++) own_.push_back(std::make_unique<Room>());
}

Lora::~Lora() = default;

void Lora::adapt(int64_t k, int64_t blocks) {
    widest_input_ = std::max(widest_input_, k);
    widest_ = std::max(widest_, blocks);
}

void Lora::begin(const pdk_step& step) {
    active_ = step.adapters != nullptr && widest_ > 0;
    if (!active_) return;
    rows_.clear(), tokens_.clear(), ranges_.clear(), parts_.clear(), pieces_.clear();
    low_width_ = 0;
    for (int64_t r = 0; r < step.rows; r++) {
        const pdk_adapter* adapter = step.adapters[r];
        if (adapter) rows_.push_back({adapter, r}), low_width_ = std::max(low_width_, adapter->most_low);
    }
    // by adapter in the order of their first rows, so that the order does not depend on addresses
    std::vector<const pdk_adapter*> order;
    for (const auto& [adapter, row] : rows_)
        if (std::find(order.begin(), order.end(), adapter) == order.end()) order.push_back(adapter);
    places_.assign(step.tokens, -1);
    for (int64_t first = 0; first < step.tokens; first += RANGE) {
        const int64_t end = std::min(step.tokens, first + RANGE), first_part = parts_.size(), begin = tokens_.size();
        for (const pdk_adapter* adapter : order) {
            const int64_t from = tokens_.size();
            for (const auto& [of_row, row] : rows_) {
                if (of_row != adapter) continue;
                const int64_t offset = step.offsets[row], last = offset + step.ends[row] - step.starts[row];
                for (int64_t i = std::max(first, offset); i < std::min(end, last); i++) {
                    places_[i] = static_cast<int64_t>(tokens_.size()) - begin;
                    tokens_.push_back(i);
                }
            }
            const int64_t count = static_cast<int64_t>(tokens_.size()) - from;
            if (count) parts_.push_back({adapter, from, count});
        }
        ranges_.push_back({first, end - first, first_part, static_cast<int64_t>(parts_.size())});
    }
    for (size_t i = 0; i < parts_.size(); i++) {
        const auto& [adapter, first, count] = parts_[i];
        const int64_t size = piece_of(count, threads_);
        for (int64_t at = 0; at < count; at += size)
            pieces_.push_back({adapter, static_cast<int64_t>(i), first + at, std::min(size, count - at)});
    }
    const int64_t most = std::min(RANGE, step.tokens);
    low_->reserve(tokens_.size() * low_width_ * sizeof(bf16));
    changes_->reserve(most * widest_ * BLOCK * sizeof(float));
    for (auto& room : own_)
        room->reserve(PIECE * (widest_input_ * sizeof(bf16) + low_width_ * sizeof(float)) + widest_input_ * sizeof(float));
}

bool Lora::changes(int64_t site) const {
    if (!active_ || site < 0) return false;
    return std::any_of(parts_.begin(), parts_.end(), [&](const Part& part) { return part.adapter->layers[site].a; });
}

Operand Lora::low(const pdk_lora& layer, int64_t part, int64_t first) const {
    const int64_t begin = parts_[part].first;
    return half_operand(low_->as<bf16>() + begin * low_width_ + (first - begin) * layer.low, layer.low);
}

// Prepares the inputs of a piece. `wide` has room for one row.
void Lora::gather(Program& p, const Source& source, const Operand& gated, const Piece& piece, const Operand& x,
                  float* wide) const {
    for (int64_t i = 0; i < piece.count; i++) {
        const int64_t token = tokens_[piece.first + i];
        const Operand to = half_operand(x.half + i * x.k, x.k);
        if (source.buffer >= 0) {
            const float* row = p.floats(source.buffer) + token * source.width;
            p.kernels.prepare(row, source.width, source.width, source.norm, source.eps, to, 0, 1);
        } else if (gated.format == Format::bf16) {
            std::memcpy(to.half, gated.half + token * gated.k, x.k * sizeof(bf16));
        } else {
            const int8_t* row = gated.quarter + token * gated.k;
            const float* scale = gated.scale + token * gated.k / BLOCK;
            for (int64_t c = 0; c < x.k; c++) wide[c] = scale[c / BLOCK] * static_cast<float>(row[c]);
            p.kernels.prepare(wide, x.k, x.k, nullptr, 0.0f, to, 0, 1);
        }
    }
}

void Lora::lower(Program& p, int64_t site, const Source& source, const Operand& gated, int thread) {
    float* wide = own_[thread]->as<float>();
    float* lows = wide + widest_input_;
    bf16* inputs = reinterpret_cast<bf16*>(lows + PIECE * low_width_);
    for (size_t i = thread; i < pieces_.size(); i += threads_) {
        const Piece& piece = pieces_[i];
        const pdk_lora& layer = piece.adapter->layers[site];
        if (!layer.a) continue;
        const Weights a = half_weights(layer.a, layer.low / BLOCK, layer.inputs);
        const Operand x = half_operand(inputs, layer.inputs);
        gather(p, source, gated, piece, x, wide);
        p.kernels.linear(a, x, piece.count, 0, a.blocks, {Store::write, lows, layer.low, layer.low, {}}, {},
                         p.scratch[thread]->as<uint8_t>());
        p.kernels.prepare(lows, layer.low, layer.low, nullptr, 0.0f, low(layer, piece.part, piece.first), 0, piece.count);
    }
}

void Lora::change(Program& p, int64_t site, const TokenRange& range, int64_t blocks, int64_t first, int64_t last,
                  Output& out, int thread) {
    if (range.first_part == range.last_part) return;
    const int64_t width = blocks * BLOCK;
    out.changes = changes_->as<float>(), out.places = places_.data() + range.first, out.change_width = width;
    const int64_t begin = parts_[range.first_part].first;
    for (int64_t i = range.first_part; i < range.last_part; i++) {
        const Part& part = parts_[i];
        const pdk_lora& layer = part.adapter->layers[site];
        float* to = changes_->as<float>() + (part.first - begin) * width;
        if (!layer.a) {
            for (int64_t r = 0; r < part.count; r++)
                std::memset(to + r * width + first * BLOCK, 0, (last - first) * BLOCK * sizeof(float));
            continue;
        }
        const Weights b = half_weights(layer.b, blocks, layer.low);
        p.kernels.linear(b, low(layer, i, part.first), part.count, first, last, {Store::write, to, width, width, {}}, {},
                         p.scratch[thread]->as<uint8_t>());
    }
}

}  // namespace pdk
