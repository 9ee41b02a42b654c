/* The C interface of pdserve's CPU kernels. Called through pdserve/base/native.py; see pdserve/model/native for how.
 *
 * A *program* is a list of operations over buffers of its own, put together once for a model and run once a step, for
 * any number of tokens. Operations name buffers, weights and row counts; what changes from step to step is in pdk_step.
 * Functions that return int64_t give -1, and those that return a pointer NULL, when memory or threads cannot be had.
 */
#ifndef PDK_H
#define PDK_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#define PDK_API __attribute__((visibility("default")))
#define PDK_VERSION 10

typedef struct pdk_arena pdk_arena;     /* memory of packed weights, given back together */
typedef struct pdk_pool pdk_pool;       /* threads; the caller of a program is one of them */
typedef struct pdk_program pdk_program;

/* One step, flattened: `tokens` tokens of `rows` rows, of which `samples` have their logits wanted. The first `prompts`
   tokens of a row are computed as those of prompts are, those behind as tokens that decode: the bits differ. */
typedef struct {
    int64_t tokens, samples, rows;
    const int64_t *ids, *positions, *write_pages, *write_slots; /* [tokens] */
    const int64_t* sample_index;                                /* [samples] */
    const int64_t *starts, *ends, *offsets, *prompts;           /* [rows] */
    const int32_t* table;                                       /* [rows][table_stride] */
    int64_t table_stride;
} pdk_step;

/* Rows that decode a token each, in the memory that they all lie in: row i is line `lines[i]` of `tokens` and of `pages`,
   of int32 with so many items a line, and computes the token at `positions[i]`. */
typedef struct {
    int64_t rows;
    const int64_t *lines, *positions; /* [rows] */
    int32_t* tokens;
    int64_t tokens_stride;
    const int32_t* pages;
    int64_t pages_stride;
} pdk_decoding;

/* The KV pool: bf16 [page][layer][k/v][kv_heads][page_tokens][dim], and the heads that attend to it. */
typedef struct {
    void* base;
    int64_t layers, kv_heads, page_tokens, dim, heads;
    float scale;
} pdk_heads;

/* A packed linear layer of `blocks` times 32 outputs, in memory of the caller's. format 0: bf16 [blocks][k / 2][32][2],
   where k are the inputs filled up to a multiple of 32; 1: int8 [blocks][k / 4][32][4], 128 added, with a scale for each
   output. bias: of each output, or NULL. */
typedef struct {
    int64_t format, blocks, inputs;
    void* data;
    float *scale, *bias;
} pdk_weights;

/* How a token is chosen: greedily, or by inverting the distribution at `point` in [0, 1). No filter: top_k at least the
   number of tokens, top_p 1, min_p 0. */
typedef struct {
    double point;
    int64_t top_k;
    float temperature, top_p, min_p;
    int32_t greedy;
} pdk_choice;

typedef struct {
    void* to;
    const void* from;
    int64_t bytes;
} pdk_move;

PDK_API int64_t pdk_version(void);
/* The digest, in hexadecimal, of the sources that this was built from: see `setup.py`. */
PDK_API const char* pdk_sources(void);
/* memmove of each, one after the other. */
PDK_API void pdk_copy(const pdk_move* moves, int64_t count);
/* Has the system put memory behind the bytes from `data`, a multiple of `page`, on. Others may write there meanwhile. */
PDK_API void pdk_touch(void* data, int64_t bytes, int64_t page);
/* 1 when this machine can run the level "amx", "zen4", "avx512_bf16", "avx512" or "avx2". Asks the system for the
   registers of "amx", for the whole process, where the machine has them; pdk_best_level does, too. */
PDK_API int64_t pdk_supports(const char* level);
/* The level that is fastest on this machine; NULL when it can run none. */
PDK_API const char* pdk_best_level(void);

PDK_API pdk_arena* pdk_arena_open(void);
PDK_API void pdk_arena_close(pdk_arena* arena);
/* Bytes taken so far. */
PDK_API int64_t pdk_arena_bytes(const pdk_arena* arena);

/* `bytes` zero bytes in huge pages, where the system has them. */
PDK_API void* pdk_arena_take(pdk_arena* arena, int64_t bytes);

/* `rows` rows of bf16 [rows][inputs], `stride` apart, to the blocks from `block` on; `bias` float or NULL. Of `parts`
   parts (1, 2, 4...) each block has 32 / parts outputs each, those of `part` behind those of the parts before. What is
   given no row is left as it is: 0, or 128 for int8. */
PDK_API void pdk_weights_put(const pdk_weights* w, int64_t block, int64_t part, int64_t parts, const void* from,
                             int64_t rows, int64_t inputs, int64_t stride, const float* bias);

/* `cpus`: the core of each thread but the caller's, or NULL for any. */
PDK_API pdk_pool* pdk_pool_open(int64_t threads, const int64_t* cpus);
PDK_API void pdk_pool_close(pdk_pool* pool);

/* Bytes of scratch for choosing from `columns` logits by the threads of `pool`. */
PDK_API int64_t pdk_choose_bytes(const pdk_pool* pool, int64_t columns);
/* tokens[r] = the choice `how[r]` from row r of float [rows][columns]. -1: there is no such level. */
PDK_API int64_t pdk_choose(pdk_pool* pool, const char* level, const float* logits, int64_t rows, int64_t columns,
                           const pdk_choice* how, float* scratch, int64_t* tokens);

PDK_API pdk_program* pdk_program_open(pdk_pool* pool, const char* level, const pdk_heads* heads);
PDK_API void pdk_program_close(pdk_program* p);
/* A buffer of `width` items a row: one row a token, or with `of_samples` one a sample. Returns its number. */
PDK_API int64_t pdk_buffer(pdk_program* p, int64_t width, int64_t item_bytes, int64_t of_samples);
PDK_API void* pdk_buffer_data(pdk_program* p, int64_t buffer);
/* Make room in all buffers; what they hold is lost when they grow. */
PDK_API int64_t pdk_reserve(pdk_program* p, int64_t tokens, int64_t samples);

/* Operations; each returns its number. float buffers, unless it says otherwise. */
PDK_API int64_t pdk_op_embed(pdk_program* p, int64_t out, const void* rows_bf16, int64_t width);
PDK_API int64_t pdk_op_angles(pdk_program* p, const float* inverse, float factor);
/* Inputs are `in`, normalised when `norm` is not NULL; or with in = -1 what `pdk_op_gated` left. add: out += */
PDK_API int64_t pdk_op_linear(pdk_program* p, int64_t in, const float* norm, float eps, const pdk_weights* w,
                              int64_t columns, int64_t out, int64_t add, int64_t of_samples);
/* silu(gate) * up of the two parts of `w`; kept for the next linear. */
PDK_API int64_t pdk_op_gated(pdk_program* p, int64_t in, const float* norm, float eps, const pdk_weights* w);
PDK_API int64_t pdk_op_norm(pdk_program* p, int64_t in, const float* norm, float eps, int64_t out_bf16);
/* Q, K, V of buffer `qkv`: norms of heads (or NULL), rotation, K and V into the pages of `layer`. */
PDK_API int64_t pdk_op_place(pdk_program* p, int64_t qkv, int64_t layer, const float* q_norm, const float* k_norm,
                             float eps);
PDK_API int64_t pdk_op_attend(pdk_program* p, int64_t layer, int64_t out, int64_t window, float softcap,
                              const float* sinks);
/* From logits [num_experts] to int64 buffer `experts` [top_k], best first, and `weights` [top_k], their probabilities,
   which are made to add up to 1 with `normalise`. */
PDK_API int64_t pdk_op_route(pdk_program* p, int64_t logits, int64_t top_k, int64_t normalise, int64_t experts,
                             int64_t weights);
/* out = (with add +=) what the `experts` of a token make of its row of `in`, normalised when `norm` is not NULL, times
   their `weights`: down(silu(gate) * up). `gate_up` and `down` have `num_experts` experts one behind the other, each of
   the former with gate and up as its parts. `counts` [num_experts] or NULL: tokens that each was given. */
PDK_API int64_t pdk_op_experts(pdk_program* p, int64_t in, const float* norm, float eps, int64_t experts,
                               int64_t weights, int64_t num_experts, const pdk_weights* gate_up,
                               const pdk_weights* down, int64_t* counts, int64_t out, int64_t add);
PDK_API int64_t pdk_op_select(pdk_program* p, int64_t in, int64_t out);
/* int64 buffer `out`, of one item: the first of the largest of each sample's row of `in`. */
PDK_API int64_t pdk_op_best(pdk_program* p, int64_t in, int64_t out);

/* Begin a step: it is read, and must stay until the last operation has run. Makes room. */
PDK_API int64_t pdk_begin(pdk_program* p, const pdk_step* step);
/* Run operations [first, last). */
PDK_API void pdk_run(pdk_program* p, int64_t first, int64_t last);
/* Begin a step of rows that decode, run operations [0, last), which leave a token for each in int64 buffer `chosen`, and
   write that behind the one that was computed, and to `out` [rows]. Nothing may be run behind it without a new `begin`. */
PDK_API int64_t pdk_decode(pdk_program* p, const pdk_decoding* rows, int64_t last, int64_t chosen, int64_t* out);

#ifdef __cplusplus
}
#endif
#endif
