// See program.h.
#include "program.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace pdk {
namespace {

constexpr size_t LINE = 64, HUGE_PAGE = 2u << 20;
constexpr int64_t GROW_TOKENS = 16;  // buffers grow in multiples of this many tokens, so that they rarely grow

size_t up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

Room::~Room() { std::free(at_); }

void Room::reserve(size_t bytes) {
    if (bytes <= bytes_) return;
    std::free(at_);
    at_ = nullptr;
    bytes_ = 0;
    const size_t unit = bytes >= HUGE_PAGE ? HUGE_PAGE : LINE;
    at_ = std::aligned_alloc(unit, up(bytes, unit));
    if (!at_) throw std::bad_alloc();
    bytes_ = up(bytes, unit);
    if (unit == HUGE_PAGE) madvise(at_, bytes_, MADV_HUGEPAGE);
}

pdk_step Decoded::read(const pdk_decoding& rows, int64_t page_tokens) {
    const int64_t n = rows.rows, longest = n ? *std::max_element(rows.positions, rows.positions + n) : 0;
    const int64_t stride = longest / page_tokens + 1;
    numbers_.resize(5 * n);
    table_.resize(n * stride);
    window_.resize(rows.window_pages ? n * stride : 0);
    slots_.resize(rows.slots ? n : 0);
    int64_t *ids = numbers_.data(), *pages = ids + n, *slots = pages + n, *every = slots + n, *ends = every + n;
    for (int64_t i = 0; i < n; i++) {
        const int64_t line = rows.lines[i], position = rows.positions[i];
        const int32_t* row = rows.pages + line * rows.pages_stride;
        ids[i] = rows.tokens[line * rows.tokens_stride + position];
        pages[i] = row[position / page_tokens];
        slots[i] = position % page_tokens;
        every[i] = i;
        ends[i] = position + 1;
        std::copy(row, row + stride, table_.data() + i * stride);
        if (rows.window_pages) {
            const int32_t* window = rows.window_pages + line * rows.window_stride;
            std::copy(window, window + stride, window_.data() + i * stride);
        }
        if (rows.slots) slots_[i] = rows.slots[line];
    }
    return {n, n, n, ids, rows.positions, pages, slots, every, rows.positions, ends, every, rows.positions,
            table_.data(), stride, rows.window_pages ? window_.data() : nullptr, stride,
            rows.slots ? slots_.data() : nullptr, nullptr, rows.folded, rows.adapters};
}

Plan& HeadGroup::plan_for(const Sight& sight) {
    for (auto& [known, plan] : plans)
        if (known.window == sight.window && known.top_k == sight.top_k) return *plan;
    plans.emplace_back(sight, std::make_unique<Plan>());
    return *plans.back().second;
}

void Turns::reset(int threads) {
    if (taken_.empty()) taken_ = std::vector<Taken>(threads);
    for (auto& of : taken_) of.count.store(0);
}

bool Turns::take(int thread, int64_t pieces, int64_t& index) {
    const int64_t threads = static_cast<int64_t>(taken_.size());
    for (int64_t i = 0; i < threads; i++) {
        const int64_t from = (thread + i) % threads;
        if (from + threads * taken_[from].count.load(std::memory_order_relaxed) >= pieces) continue;
        index = from + threads * taken_[from].count.fetch_add(1);
        if (index < pieces) return true;
    }
    return false;
}

Program::Program(Pool& pool, const Kernels& kernels) : pool(pool), kernels(kernels), lora(pool.size()) {
    for (int t = 0; t < pool.size(); t++) {
        own_.push_back(std::make_unique<Room>());
        scratch.push_back(std::make_unique<Room>());
    }
}

int64_t Program::add(std::unique_ptr<Op> op) {
    if (op->prepares()) preparing_.push_back(op.get());
    if (!ops_.empty()) ops_.back()->next = op.get();
    ops_.push_back(std::move(op));
    return static_cast<int64_t>(ops_.size()) - 1;
}

int64_t Program::add_heads(const pdk_heads& heads) {
    groups.push_back(std::make_unique<HeadGroup>(heads));
    const int64_t group = heads.kv_heads ? heads.heads / heads.kv_heads : 1;
    need_scratch(extend_scratch_bytes(group, heads.dim));
    tokens_ = samples_ = 0;
    return static_cast<int64_t>(groups.size()) - 1;
}

int64_t Program::add_buffer(int64_t width, int64_t item_bytes, bool of_samples) {
    buffers.push_back({width, item_bytes, of_samples, std::make_unique<Room>()});
    tokens_ = samples_ = 0;
    return static_cast<int64_t>(buffers.size()) - 1;
}

void Program::reserve(int64_t tokens, int64_t samples) {
    if (tokens <= tokens_ && samples <= samples_) return;
    tokens_ = std::max<int64_t>(tokens_, up(tokens, GROW_TOKENS));
    samples_ = std::max<int64_t>(samples_, up(samples, GROW_TOKENS));
    for (const Buffer& b : buffers)
        b.room->reserve(static_cast<size_t>(b.of_samples ? samples_ : tokens_) * b.width * b.item_bytes + LINE);
    const int64_t most = std::max(tokens_, samples_);
    shared_.reserve(operand_bytes(most, operand_width_));
    gated_.reserve(operand_bytes(most, gated_width_));
    for (auto& group : groups) {
        const pdk_heads& heads = group->heads;
        group->cos.reserve(tokens_ * group->half * sizeof(float) + LINE);
        group->sin.reserve(tokens_ * group->half * sizeof(float) + LINE);
        q.reserve(tokens_ * heads.heads * padded(heads.dim) * sizeof(bf16) + LINE);
    }
    for (auto& room : own_) room->reserve(operand_bytes(OWN_ROWS, operand_width_));
    for (auto& room : scratch) room->reserve(scratch_bytes_);
}

void Program::begin(const pdk_step& now) {
    pool.rouse();
    step = now;
    reserve(step.tokens, step.samples);
    lora.begin(step);
    size_t floats_of_partials = 0;
    bool has_window = false;
    for (auto& group : groups) {
        const pdk_heads& heads = group->heads;
        has_window |= heads.of_window != 0;
        for (auto& [sight, plan] : group->plans) {
            plan->make(step, heads.kv_heads, heads.heads / heads.kv_heads, heads.dim, sight, pool.size());
            floats_of_partials = std::max<size_t>(floats_of_partials, plan->partials * plan->partial_floats);
        }
    }
    if (has_window) {
        const int64_t size = groups[0]->heads.page_tokens;
        window_pages_.resize(step.tokens);
        for (int64_t r = 0; r < step.rows; r++)
            for (int64_t at = step.starts[r], i = step.offsets[r]; at < step.ends[r]; at++, i++)
                window_pages_[i] = step.window_table[r * step.window_stride + at / size];
    }
    partials.reserve(floats_of_partials * sizeof(float));
    for (auto& selection : selections) selection->make(step);
    for (Op* op : preparing_) op->prepare_for(*this);
}

void Program::run(int64_t first, int64_t last) {
    struct Range {
        Program* program;
        int64_t first, last;
    } range{this, first, last};
    pool.run(
        [](void* argument, int thread) {
            const Range& r = *static_cast<Range*>(argument);
            for (int64_t i = r.first; i < r.last; i++) {
                r.program->ops_[i]->run(*r.program, thread);
                if (i + 1 < r.last) r.program->pool.meet();
            }
        },
        &range);
}

void Program::share(int64_t n, int thread, int64_t& first, int64_t& last) const {
    first = n * thread / pool.size();
    last = n * (thread + 1) / pool.size();
}

Pages Program::pages_of(int64_t group, int64_t layer) const {
    const pdk_heads& heads = groups[group]->heads;
    return {static_cast<bf16*>(heads.base) + layer * heads.layer_stride, heads.page_stride, heads.value_offset,
            heads.page_tokens, heads.dim, static_cast<KVFormat>(heads.kv_format),
            row_items(static_cast<KVFormat>(heads.kv_format), heads.dim)};
}

Attention Program::attention_of(int64_t group, int64_t layer) const {
    const pdk_heads& heads = groups[group]->heads;
    const bool of_window = heads.of_window != 0;
    return {pages_of(group, layer), {}, q.as<bf16>(), nullptr, heads.kv_heads, heads.heads / heads.kv_heads,
            step.tokens, step.starts, step.ends, step.offsets, of_window ? step.window_table : step.table,
            of_window ? step.window_stride : step.table_stride};
}

Selection& Program::selection_for(int64_t top_k) {
    for (auto& selection : selections)
        if (selection->top_k == top_k) return *selection;
    selections.push_back(std::make_unique<Selection>(top_k));
    return *selections.back();
}

const int64_t* Program::write_pages(int64_t group) const {
    return groups[group]->heads.of_window ? window_pages_.data() : step.write_pages;
}

// bf16 is the upper bound: int8 with its scales and sums is smaller.
size_t Program::operand_bytes(int64_t rows, int64_t k) {
    return up(static_cast<size_t>(rows) * k * 2, LINE) + 3 * LINE;
}
Operand Program::operand(const Room& room, Format format, int64_t rows, int64_t k) {
    char* at = room.as<char>();
    if (format == Format::bf16) return {format, k, reinterpret_cast<bf16*>(at), nullptr, nullptr, nullptr};
    const size_t groups = static_cast<size_t>(rows) * k / BLOCK;
    char* scale = at + up(static_cast<size_t>(rows) * k, LINE);
    char* offset = scale + up(groups * sizeof(float), LINE);
    return {format, k, nullptr, reinterpret_cast<int8_t*>(at), reinterpret_cast<float*>(scale),
            reinterpret_cast<int32_t*>(offset)};
}

Operand Program::shared(Format format, int64_t k) const {
    return operand(shared_, format, std::max(tokens_, samples_), k);
}
Operand Program::own(Format format, int64_t k, int thread) const { return operand(*own_[thread], format, OWN_ROWS, k); }
Operand Program::gated(Format format, int64_t k) const {
    return operand(gated_, format, std::max(tokens_, samples_), k);
}

}  // namespace pdk
