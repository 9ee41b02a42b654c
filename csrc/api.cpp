// The C interface (pdk.h) over the classes, and kernel selection by CPU features. No exception crosses the interface.
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>

#include "choose.h"
#include "delta.h"
#include "experts.h"
#include "latent.h"
#include "ops.h"
#include "pdk.h"
#include "sparse.h"
#include "weights.h"

struct pdk_arena : pdk::Arena {};
struct pdk_pool : pdk::Pool {
    using Pool::Pool;
};
struct pdk_program : pdk::Program {
    using Program::Program;
};

namespace {

using namespace pdk;

constexpr int64_t ALONE = 1 << 17;  // fewer logits are sampled faster by one thread than other threads wake up

bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512_bf16() {
    return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

// Linux grants tile registers on request only; older kernels do not know the request.
bool has_amx() {
    static const bool got = [] {
        constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM
        return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
               syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    }();
    return got && has_avx512_bf16();
}

const Kernels* kernels_of(const std::string& level) {
    if (level == "amx" && has_amx()) return &amx::kernels;
    if (level == "zen4" && has_avx512_bf16()) return &zen4::kernels;
    if (level == "avx512_bf16" && has_avx512_bf16()) return &avx512_bf16::kernels;
    if (level == "avx512" && has_avx512()) return &avx512::kernels;
    if (level == "avx2" && has_avx2()) return &avx2::kernels;
    return nullptr;
}

Weights weights_of(const pdk_weights& w) {
    return {static_cast<Format>(w.format), w.blocks, padded(w.inputs), static_cast<uint8_t*>(w.data), w.scale, w.bias,
            w.group, w.mins != 0};
}

// The weights of an operation of `p`, which gets the scratch for their products.
Weights weights_for(pdk_program* p, const pdk_weights& w) {
    const Weights weights = weights_of(w);
    p->need_scratch(linear_scratch_bytes(weights));
    return weights;
}

// Calls `make`; returns null when memory or threads run out.
template <class Make>
auto guarded(Make&& make) noexcept -> decltype(make()) {
    try {
        return make();
    } catch (const std::exception&) {
        return nullptr;
    }
}
template <class Make>
int64_t counted(Make&& make) noexcept {
    try {
        return make();
    } catch (const std::exception&) {
        return -1;
    }
}

}  // namespace

extern "C" {

int64_t pdk_version(void) { return PDK_VERSION; }
const char* pdk_sources(void) { return PDK_SOURCES; }
void pdk_copy(const pdk_move* moves, int64_t count) {
    for (int64_t i = 0; i < count; i++) std::memmove(moves[i].to, moves[i].from, moves[i].bytes);
}
void pdk_touch(void* data, int64_t bytes, int64_t page) {
    uint8_t* first = static_cast<uint8_t*>(data);
    for (int64_t i = 0; i < bytes; i += page) asm volatile("lock orb $0, %0" : "+m"(first[i]));  // changes nothing
}
int64_t pdk_supports(const char* level) { return kernels_of(level) != nullptr; }
const char* pdk_best_level(void) {
    if (has_amx()) return "amx";
    if (has_avx512_bf16()) return __builtin_cpu_is("amdfam19h") ? "zen4" : "avx512_bf16";  // Zen 3 has no AVX-512
    return has_avx512() ? "avx512" : has_avx2() ? "avx2" : nullptr;
}

pdk_arena* pdk_arena_open(void) {
    return guarded([] { return new pdk_arena(); });
}
void pdk_arena_close(pdk_arena* arena) { delete arena; }
int64_t pdk_arena_bytes(const pdk_arena* arena) { return arena->bytes(); }

void* pdk_arena_take(pdk_arena* arena, int64_t bytes) {
    return guarded([&] { return arena->take(static_cast<size_t>(bytes)); });
}
void pdk_weights_put(const pdk_weights* w, int64_t block, int64_t part, int64_t parts, const void* from, int64_t rows,
                     int64_t inputs, int64_t stride, const float* bias) {
    put_rows(weights_of(*w), block, part, parts, static_cast<const bf16*>(from), rows, inputs, stride, bias);
}
void pdk_weights_put_values(const pdk_weights* w, int64_t block, int64_t part, int64_t parts, const uint8_t* values,
                            const float* scale, const float* mins, int64_t rows, int64_t inputs, const float* bias) {
    put_values(weights_of(*w), block, part, parts, {values, scale, mins}, rows, inputs, bias);
}

pdk_pool* pdk_pool_open(int64_t threads, const int64_t* cpus) {
    return guarded([&] { return new pdk_pool(static_cast<int>(threads), cpus); });
}
void pdk_pool_close(pdk_pool* pool) { delete pool; }

int64_t pdk_choose_bytes(const pdk_pool* pool, int64_t columns) {
    return pool->size() * choose_floats(columns) * static_cast<int64_t>(sizeof(float));
}
int64_t pdk_choose(pdk_pool* pool, const char* level, const float* logits, int64_t rows, int64_t columns,
                   const pdk_choice* how, float* scratch, int64_t* tokens) {
    struct Rows {
        const Kernels* kernels;
        const float* logits;
        int64_t rows, columns;
        const pdk_choice* how;
        float* scratch;
        int64_t* tokens;
        std::atomic<int64_t> next;
    } all{kernels_of(level), logits, rows, columns, how, scratch, tokens, {0}};
    if (!all.kernels) return -1;
    const auto work = [](void* argument, int thread) {
        Rows& a = *static_cast<Rows*>(argument);
        float* scratch = a.scratch + thread * choose_floats(a.columns);
        for (int64_t r = a.next.fetch_add(1); r < a.rows; r = a.next.fetch_add(1))
            a.tokens[r] = choose(*a.kernels, a.logits + r * a.columns, a.columns, a.how[r], scratch);
    };
    if (rows == 1 || rows * columns < ALONE) work(&all, 0);  // not worth waking the other threads
    else pool->run(work, &all);
    return 0;
}

pdk_program* pdk_program_open(pdk_pool* pool, const char* level) {
    const Kernels* kernels = kernels_of(level);
    if (!kernels) return nullptr;
    return guarded([&] { return new pdk_program(*pool, *kernels); });
}
void pdk_program_close(pdk_program* p) { delete p; }
int64_t pdk_add_heads(pdk_program* p, const pdk_heads* heads) {
    return counted([&] { return p->add_heads(*heads); });
}

int64_t pdk_buffer(pdk_program* p, int64_t width, int64_t item_bytes, int64_t of_samples) {
    return counted([&] { return p->add_buffer(width, item_bytes, of_samples != 0); });
}
void* pdk_buffer_data(pdk_program* p, int64_t buffer) { return p->buffers[buffer].room->as<void>(); }
int64_t pdk_reserve(pdk_program* p, int64_t tokens, int64_t samples) {
    return counted([&] { return p->reserve(tokens, samples), 0; });
}

int64_t pdk_op_embed(pdk_program* p, int64_t out, const void* rows, int64_t width, float scale) {
    return counted([&] { return p->add(std::make_unique<Embed>(out, width, static_cast<const bf16*>(rows), scale)); });
}
int64_t pdk_op_embed_packed(pdk_program* p, int64_t out, const pdk_weights* w, int64_t width, float scale) {
    return counted([&] { return p->add(std::make_unique<EmbedPacked>(out, width, weights_of(*w), scale)); });
}
int64_t pdk_op_angles(pdk_program* p, int64_t heads, const float* inverse, int64_t half, float factor) {
    return counted([&] {
        p->groups[heads]->half = half;
        return p->add(std::make_unique<Angles>(heads, inverse, half, factor));
    });
}
int64_t pdk_op_linear(pdk_program* p, int64_t in, const float* norm, float eps, const pdk_weights* w, int64_t columns,
                      int64_t out, int64_t add, float scale, int64_t of_samples) {
    return counted([&] {
        const Weights weights = weights_for(p, *w);
        if (in >= 0) p->need_operand(weights.k);
        const Source source{in, in >= 0 ? p->buffers[in].width : 0, norm, eps};
        const Store store = add ? Store::add : Store::write;
        return p->add(
            std::make_unique<Product>(source, weights, columns, out, store, scale, Activation{}, of_samples != 0));
    });
}
int64_t pdk_op_gated(pdk_program* p, int64_t in, const float* norm, float eps, const pdk_weights* w, int64_t act,
                     float limit) {
    return counted([&] {
        const Weights weights = weights_for(p, *w);
        const int64_t inner = weights.blocks / 2 * BLOCK;
        p->need_operand(weights.k);
        p->need_gated(inner);
        const Source source{in, p->buffers[in].width, norm, eps};
        const bool of_samples = p->buffers[in].of_samples;
        const Activation activation{static_cast<Act>(act), limit};
        return p->add(
            std::make_unique<Product>(source, weights, inner, -1, Store::gated, 1.0f, activation, of_samples));
    });
}
int64_t pdk_op_norm(pdk_program* p, int64_t in, const float* norm, float eps, int64_t out) {
    return counted([&] { return p->add(std::make_unique<Norm>(in, out, norm, eps)); });
}
int64_t pdk_op_place(pdk_program* p, int64_t heads, int64_t qkv, int64_t layer, const float* q_norm,
                     const float* k_norm, float eps, int64_t whole) {
    return counted(
        [&] { return p->add(std::make_unique<Place>(heads, qkv, layer, q_norm, k_norm, eps, whole != 0)); });
}
int64_t pdk_op_head_product(pdk_program* p, int64_t in, int64_t first, int64_t stride, int64_t sharing,
                            int64_t columns, int64_t heads, const pdk_weights* w, int64_t out) {
    return counted([&] {
        const Weights weights = weights_for(p, *w);
        p->need_operand(weights.k);
        return p->add(std::make_unique<HeadProduct>(in, first, stride, sharing, columns, heads, weights, out));
    });
}
int64_t pdk_op_place_latents(pdk_program* p, int64_t heads, int64_t absorbed, int64_t queries, int64_t down,
                             int64_t layer, const float* norm, float eps, int64_t pairs) {
    return counted([&] {
        return p->add(std::make_unique<PlaceLatents>(heads, absorbed, queries, down, layer, norm, eps,
                                                     static_cast<Pairs>(pairs)));
    });
}
int64_t pdk_op_place_index(pdk_program* p, int64_t heads, int64_t queries, int64_t keys, int64_t layer,
                           const float* norm, const float* bias, float eps, int64_t beside) {
    return counted([&] {
        return p->add(std::make_unique<PlaceIndex>(heads, queries, keys, layer, norm, bias, eps, beside != 0));
    });
}
int64_t pdk_op_select_tokens(pdk_program* p, int64_t heads, int64_t layer, int64_t weights, float scale,
                             int64_t top_k) {
    return counted([&] {
        return p->add(std::make_unique<SelectTokens>(heads, layer, weights, scale, &p->selection_for(top_k)));
    });
}
int64_t pdk_op_attend_selected(pdk_program* p, int64_t heads, int64_t layer, int64_t out, int64_t top_k) {
    return counted([&] {
        p->groups[heads]->plan_for({0, top_k});
        p->need_scratch(Gathered::scratch_bytes(p->groups[heads]->heads, top_k));
        return p->add(std::make_unique<Attend>(heads, layer, out, Mask{}, &p->selection_for(top_k)));
    });
}
int64_t pdk_op_attend(pdk_program* p, int64_t heads, int64_t layer, int64_t out, int64_t window, float softcap,
                      const float* sinks) {
    return counted([&] {
        p->groups[heads]->plan_for({window, 0});
        return p->add(std::make_unique<Attend>(heads, layer, out, Mask{window, softcap, sinks}));
    });
}
int64_t pdk_op_sigmoid(pdk_program* p, int64_t in, int64_t gates, int64_t first, int64_t wide, int64_t out,
                       int64_t add) {
    return counted([&] { return p->add(std::make_unique<Sigmoid>(in, gates, first, wide, out, add != 0)); });
}
int64_t pdk_op_delta(pdk_program* p, const pdk_states* states, int64_t in, int64_t gates, const float* conv,
                     const float* decay, const float* bias, const float* norm, float eps, int64_t out) {
    return counted([&] {
        p->need_scratch(delta_scratch_bytes(states->key_dim, states->value_dim, states->taps, gates >= 0));
        return p->add(std::make_unique<DeltaNet>(*states, in, gates, conv, decay, bias, norm, eps, out));
    });
}
int64_t pdk_op_route(pdk_program* p, int64_t logits, const pdk_routing* how, int64_t experts, int64_t weights) {
    return counted([&] {
        const Routing routing{how->top_k, how->normalise != 0, how->sigmoid != 0, how->groups, how->top_groups,
                              how->scale, how->correction};
        const int64_t floats = Route::scratch_floats(routing, p->buffers[logits].width);
        p->need_scratch(floats * static_cast<int64_t>(sizeof(float)));
        return p->add(std::make_unique<Route>(logits, routing, experts, weights));
    });
}
int64_t pdk_op_experts(pdk_program* p, int64_t in, const float* norm, float eps, int64_t experts, int64_t weights,
                       int64_t num_experts, const pdk_weights* gate_up, const pdk_weights* down, int64_t act,
                       float limit, int64_t* counts, int64_t out, int64_t add) {
    return counted([&] {
        const Source source{in, p->buffers[in].width, norm, eps};
        const Activation activation{static_cast<Act>(act), limit};
        const Mixture mixture{num_experts, weights_for(p, *gate_up), weights_for(p, *down), activation, counts};
        return p->add(std::make_unique<Experts>(source, experts, weights, mixture, out, add != 0));
    });
}
int64_t pdk_op_add(pdk_program* p, int64_t in, const float* norm, float eps, float scale, int64_t out) {
    return counted([&] { return p->add(std::make_unique<AddRows>(in, norm, eps, scale, out)); });
}
int64_t pdk_op_cap(pdk_program* p, int64_t buffer, float scale, float softcap) {
    return counted([&] { return p->add(std::make_unique<Cap>(buffer, scale, softcap)); });
}
int64_t pdk_op_select(pdk_program* p, int64_t in, int64_t out) {
    return counted([&] { return p->add(std::make_unique<Select>(in, out)); });
}
int64_t pdk_op_argmax(pdk_program* p, int64_t in, int64_t out) {
    return counted([&] { return p->add(std::make_unique<Argmax>(in, out)); });
}

int64_t pdk_adapt(pdk_program* p, int64_t op, int64_t site) {
    return counted([&] {
        Product& product = static_cast<Product&>(p->op(op));
        product.site = site;
        p->lora.adapt(product.weights.k, product.weights.blocks);
        return site;
    });
}

int64_t pdk_begin(pdk_program* p, const pdk_step* step) {
    return counted([&] { return p->begin(*step), 0; });
}
void pdk_run(pdk_program* p, int64_t first, int64_t last) { p->run(first, last); }
int64_t pdk_decode(pdk_program* p, const pdk_decoding* rows, int64_t last, int64_t chosen, int64_t* out) {
    return counted([&] {
        p->begin(p->decoded.read(*rows, p->groups[0]->heads.page_tokens));
        p->run(0, last);
        const int64_t* tokens = p->buffers[chosen].room->as<int64_t>();
        for (int64_t i = 0; i < rows->rows; i++) {
            out[i] = tokens[i];
            rows->tokens[rows->lines[i] * rows->tokens_stride + rows->positions[i] + 1] = static_cast<int32_t>(tokens[i]);
        }
        return 0;
    });
}

}  // extern "C"
