/* The C interface of pdserve's CPU kernels. Called through pdserve/base/native.py by pdserve/model/native.
 *
 * A *program* is a list of operations over its own buffers, recorded once per model and run once per step, for any
 * number of tokens. Operations name buffers, weights and row counts; pdk_step holds what changes from step to step.
 * Functions return -1 (int64_t) or NULL (pointers) when memory or threads run out.
 */
#ifndef PDK_H
#define PDK_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#define PDK_API __attribute__((visibility("default")))
#define PDK_VERSION 18

typedef struct pdk_arena pdk_arena;     /* memory of packed weights, freed together */
typedef struct pdk_pool pdk_pool;       /* threads; the caller of a program is one of them */
typedef struct pdk_program pdk_program;

/* What a LoRA adapter adds to the outputs of a linear layer: B A x. `a` is a packed layer of format 0, see pdk_weights,
   with `low` outputs and `inputs` inputs, `b` one with the blocks of the layer that it changes and `low` inputs. Both
   numbers are multiples of 32. a NULL: the adapter does not change this layer. */
typedef struct {
    const void *a, *b;
    int64_t inputs, low;
} pdk_lora;

/* `layers` has one entry for each layer of pdk_adapt; `most_low` is the largest `low` of them. */
typedef struct {
    const pdk_lora* layers;
    int64_t most_low;
} pdk_adapter;

/* One step, flattened: `tokens` tokens of `rows` rows. `samples` of the tokens need logits. The first `prompts` tokens
   of a row are computed as prompt tokens, later ones as decode tokens; the bits differ. The last `drafts` tokens of a
   row are drafts: such a row has 1 + drafts decode tokens, which it leaves pending, see pdk_states. The first `folded`
   of the tokens that are pending in a row's slot are added to its states before the row, the others are dropped. */
typedef struct {
    int64_t tokens, samples, rows;
    const int64_t *ids, *positions, *write_pages, *write_slots; /* [tokens] */
    const int64_t* sample_index;                                /* [samples] */
    const int64_t *starts, *ends, *offsets, *prompts;           /* [rows] */
    const int32_t* table;                                       /* [rows][table_stride] */
    int64_t table_stride;
    const int32_t* window_table; /* [rows][window_stride]: the same for heads `of_window`; else NULL */
    int64_t window_stride;
    const int32_t* slots; /* [rows]: state slots; NULL without pdk_op_delta */
    const int64_t *drafts, *folded; /* [rows], or NULL for zeros */
    const pdk_adapter* const* adapters; /* [rows], NULL for rows without one; or NULL: no row has one */
} pdk_step;

/* Rows that decode one token each, over shared tables: row i is line `lines[i]` of `tokens` and of `pages`, and
   computes the token at `positions[i]`. The strides are int32 items per line. */
typedef struct {
    int64_t rows;
    const int64_t *lines, *positions; /* [rows] */
    int32_t* tokens;
    int64_t tokens_stride;
    const int32_t* pages;
    int64_t pages_stride;
    const int32_t* window_pages; /* as `pages`, or NULL: see pdk_step */
    int64_t window_stride;
    const int32_t* slots; /* of each line, or NULL */
    const int64_t* folded; /* [rows], or NULL: see pdk_step */
    const pdk_adapter* const* adapters; /* [rows], or NULL: see pdk_step */
} pdk_decoding;

/* A KV pool and the heads that attend to it. K of a page and layer is [kv_heads][page_tokens] rows at
   base + page * page_stride + layer * layer_stride, and V lies value_offset after it. A row has `dim` values in
   `kv_format` 0: bf16; 1: int8, padded to a multiple of 4 bytes, and then a float scale; 2: FP8 E4M3. Strides are in
   items of 2 bytes. Page
   numbers are those of `table`, or with `of_window` those of `window_table`, whose entries behind the window are
   undefined. `page_tokens` is equal in all heads of a program. */
typedef struct {
    void* base;
    int64_t page_stride, layer_stride, value_offset, kv_heads, page_tokens, dim, heads, of_window, kv_format;
    float scale;
} pdk_heads;

/* Recurrent states of a GatedDeltaNet layer. A slot's are slot * slot_stride bytes after these addresses: the last
   `taps - 1` inputs of the convolution, bf16, conv_q and conv_k [key_heads][key_dim][taps - 1] and conv_v
   [value_heads][value_dim][taps - 1]; and `state`, float [value_heads][key_dim][value_dim].

   A row with drafts does not write these. It leaves its tokens pending: token t of slot s is number s * pending + t of
   `inputs`, bf16 [columns of q, k and v], of the convolution; of `keys`, float [key_heads][key_dim], of length 1; of
   `deltas`, float [value_heads][value_dim], by which a state changes along the key; and of `decays`, float
   [value_heads], or [value_heads][key_dim] where each row of a state has a decay. `pending` is the most tokens of such
   a row, at most PDK_PENDING; 0: no row has drafts, and the addresses are NULL. */
#define PDK_PENDING 32
typedef struct {
    void *conv_q, *conv_k, *conv_v, *state;
    int64_t slot_stride, key_heads, value_heads, key_dim, value_dim, taps;
    void *inputs, *keys, *deltas, *decays;
    int64_t pending;
} pdk_states;

/* A packed linear layer of `blocks` * 32 outputs, in the caller's memory. format 0: bf16 [blocks][k / 2][32][2], where
   k is the number of inputs padded to a multiple of 32. format 1: int8 [blocks][k / 4][32][4], with 128 added, and a
   scale per output. format 2: values of 4 bits, bytes [blocks][k / 4][16][4], with output j of a block in the low and
   output j + 16 in the high bits. format 3: values of 8 bits, laid out as format 1. Formats 2 and 3 have a scale per
   output and `group` inputs, a multiple of 32: `scale` is [blocks][groups][32], and a weight is scale * (value - 8), or
   - 128 in format 3. With `mins` 1 it is [blocks][groups][2][32], and a weight is the first * value + the second.
   format 4: codes of FP8 E4M3, bytes [blocks][k / 4][32][4], and scales as in format 3: a weight is scale * code, rounded
   to bf16. format 5: MXFP4, [blocks][k / 32] of 32 exponents and 512 bytes of codes; no scale. csrc/kernels.h has the
   order of inputs in both. bias: one per output, or NULL. */
typedef struct {
    int64_t format, blocks, inputs;
    void* data;
    float *scale, *bias;
    int64_t group, mins;
} pdk_weights;

/* How the experts of a token are chosen. The scores of experts are the softmax of their logits, or with `sigmoid` the
   sigmoid of each. `correction` [experts] or NULL is added to them for the choice only. The experts are `groups` groups
   of equal size, and the `top_groups` best of these are chosen from: by the largest score of a group, with `sigmoid` by
   the sum of its two largest. With `normalise` the weights of a token, which are the scores of its experts, are divided
   by their sum; then they are multiplied by `scale`. */
typedef struct {
    int64_t top_k, normalise, sigmoid, groups, top_groups;
    float scale;
    const float* correction;
} pdk_routing;

/* How a token is sampled: greedily, or by inverting the distribution at `point` in [0, 1). No filter: top_k at least
   the vocabulary size, top_p 1, min_p 0. */
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
/* The digest, in hexadecimal, of the sources that the library was built from: see `setup.py`. */
PDK_API const char* pdk_sources(void);
/* Does memmove for each entry, in order. */
PDK_API void pdk_copy(const pdk_move* moves, int64_t count);
/* Commits the memory pages of [data, data + bytes); `data` is a multiple of `page`. Other threads may write there
   meanwhile. */
PDK_API void pdk_touch(void* data, int64_t bytes, int64_t page);
/* 1 when this machine can run the level "amx", "zen4", "avx512_bf16", "avx512" or "avx2", else 0. Both this function
   and pdk_best_level request the AMX tile registers from the kernel, for the whole process, where the CPU has them. */
PDK_API int64_t pdk_supports(const char* level);
/* The fastest level on this machine; NULL when it can run none. */
PDK_API const char* pdk_best_level(void);

PDK_API pdk_arena* pdk_arena_open(void);
PDK_API void pdk_arena_close(pdk_arena* arena);
/* Bytes allocated so far. */
PDK_API int64_t pdk_arena_bytes(const pdk_arena* arena);

/* Allocates `bytes` zero bytes, in huge pages where the system has them. */
PDK_API void* pdk_arena_take(pdk_arena* arena, int64_t bytes);

/* Packs `rows` rows of bf16 [rows][inputs], `stride` apart, into the blocks from `block` on; `bias` float or NULL. With
   `parts` parts (1, 2, 4...) each block has 32 / parts outputs of each part, in the order of the parts; the rows belong
   to `part`. Outputs without a row keep their values: 0, or 128 for int8. */
PDK_API void pdk_weights_put(const pdk_weights* w, int64_t block, int64_t part, int64_t parts, const void* from,
                             int64_t rows, int64_t inputs, int64_t stride, const float* bias);
/* The same for weights of formats 1 to 5 that are values already, or codes, bytes [rows][inputs], with `scale` and
   `mins` [rows][groups], or NULL without mins. In format 1 there is one group. Scales of format 5 are powers of two. */
PDK_API void pdk_weights_put_values(const pdk_weights* w, int64_t block, int64_t part, int64_t parts,
                                    const uint8_t* values, const float* scale, const float* mins, int64_t rows,
                                    int64_t inputs, const float* bias);

/* `cpus`: the core of each thread except the caller's, or NULL to leave threads unpinned. */
PDK_API pdk_pool* pdk_pool_open(int64_t threads, const int64_t* cpus);
PDK_API void pdk_pool_close(pdk_pool* pool);

/* Bytes of scratch for pdk_choose with `columns` logits on the threads of `pool`. */
PDK_API int64_t pdk_choose_bytes(const pdk_pool* pool, int64_t columns);
/* tokens[r] = the token sampled with `how[r]` from row r of float [rows][columns]. Returns -1 for an unknown level. */
PDK_API int64_t pdk_choose(pdk_pool* pool, const char* level, const float* logits, int64_t rows, int64_t columns,
                           const pdk_choice* how, float* scratch, int64_t* tokens);

PDK_API pdk_program* pdk_program_open(pdk_pool* pool, const char* level);
PDK_API void pdk_program_close(pdk_program* p);
/* Adds heads of equal shape, which layers share. Returns their number. */
PDK_API int64_t pdk_add_heads(pdk_program* p, const pdk_heads* heads);
/* Adds a buffer of `width` items per row: one row per token, or with `of_samples` one per sample. Returns its number.
   */
PDK_API int64_t pdk_buffer(pdk_program* p, int64_t width, int64_t item_bytes, int64_t of_samples);
PDK_API void* pdk_buffer_data(pdk_program* p, int64_t buffer);
/* Sizes all buffers for that many tokens and samples; buffers that grow lose their contents. */
PDK_API int64_t pdk_reserve(pdk_program* p, int64_t tokens, int64_t samples);

/* Operations; each function returns the operation's number. Buffers are float unless stated otherwise. */
/* out = `scale` times the rows of the step's tokens. */
PDK_API int64_t pdk_op_embed(pdk_program* p, int64_t out, const void* rows_bf16, int64_t width, float scale);
/* The same from a packed layer of formats 0 to 3 with `width` inputs: a token's row is that output's weights. */
PDK_API int64_t pdk_op_embed_packed(pdk_program* p, int64_t out, const pdk_weights* w, int64_t width, float scale);
/* The first 2 * `half` columns of `heads` are rotated by positions times `inverse` [half]. Before pdk_op_place. Heads
   without this operation are not rotated. */
PDK_API int64_t pdk_op_angles(pdk_program* p, int64_t heads, const float* inverse, int64_t half, float factor);
/* Inputs are `in`, normalised when `norm` is not NULL; with in = -1 they are the output of `pdk_op_gated`. add: out +=
   scale * the product; without `add` the scale is not used. */
PDK_API int64_t pdk_op_linear(pdk_program* p, int64_t in, const float* norm, float eps, const pdk_weights* w,
                              int64_t columns, int64_t out, int64_t add, float scale, int64_t of_samples);
/* Of the two parts of `w`, gate and up, kept for the next linear. act 0: silu(gate) * up. 1: gelu(gate) * up, GELU
   approximated by tanh. 2: (up + 1) * gate * sigmoid(1.702 * gate), gate being at most `limit`, and up between it and
   its negative. */
PDK_API int64_t pdk_op_gated(pdk_program* p, int64_t in, const float* norm, float eps, const pdk_weights* w,
                             int64_t act, float limit);
PDK_API int64_t pdk_op_norm(pdk_program* p, int64_t in, const float* norm, float eps, int64_t out_bf16);
/* Applies norms (or NULL) and rotation to the `heads` in the first columns of buffer `qkv`, and writes K and V to the
   pages of `layer`. The norms are [dim], of each head; with `whole` 1 [heads * dim] and [kv_heads * dim], of all query
   heads together and of all keys together. */
PDK_API int64_t pdk_op_place(pdk_program* p, int64_t heads, int64_t qkv, int64_t layer, const float* q_norm,
                             const float* k_norm, float eps, int64_t whole);
/* Of each of `heads` heads: `columns` columns of `in`, from first + head / sharing * stride on, times the head's part of
   `w`, whose layers lie one after the other. `out` has equally many columns of each head. */
PDK_API int64_t pdk_op_head_product(pdk_program* p, int64_t in, int64_t first, int64_t stride, int64_t sharing,
                                    int64_t columns, int64_t heads, const pdk_weights* w, int64_t out);
/* Multi-head latent attention: `heads` has one KV head of rank + rope columns, whose values are its keys (value_offset
   0). Queries are `absorbed` [heads][rank] with the last rope columns of `queries` [heads][nope + rope]; latents are
   `down` [rank + rope], the first columns normalised by `norm` [rank]. The rope columns of both are rotated: pairs are
   in the two halves (pairs 0), beside each other in the inputs and in the halves afterwards (1), or always beside each
   other (2). Writes the latents to the pages of `layer`. */
PDK_API int64_t pdk_op_place_latents(pdk_program* p, int64_t heads, int64_t absorbed, int64_t queries, int64_t down,
                                     int64_t layer, const float* norm, float eps, int64_t pairs);
/* The index of sparse attention (DSA): `heads` has one KV head and no values (value_offset 0). Queries are `queries`
   [heads][dim], and keys `keys` [dim] after a layer norm with weight `norm` and `bias` [dim]. The first columns of both
   are rotated; with `beside` 1 the columns of a pair are beside each other in the inputs, and in the halves afterwards.
   Writes the keys to the pages of `layer`. */
PDK_API int64_t pdk_op_place_index(pdk_program* p, int64_t heads, int64_t queries, int64_t keys, int64_t layer,
                                   const float* norm, const float* bias, float eps, int64_t beside);
/* Behind pdk_op_place_index. Each token that sees more than `top_k` tokens selects those with the highest scores: the sum
   over heads of its `weights` [heads], times `scale`, times max(0, q k). Of equal scores the earlier token is taken. */
PDK_API int64_t pdk_op_select_tokens(pdk_program* p, int64_t heads, int64_t layer, int64_t weights, float scale,
                                     int64_t top_k);
/* Attention over latents, of tokens that see more than `top_k` tokens over those that the last pdk_op_select_tokens with
   this `top_k` has selected. */
PDK_API int64_t pdk_op_attend_selected(pdk_program* p, int64_t heads, int64_t layer, int64_t out, int64_t top_k);
PDK_API int64_t pdk_op_attend(pdk_program* p, int64_t heads, int64_t layer, int64_t out, int64_t window, float softcap,
                              const float* sinks);
/* out = (with add +=) in * sigmoid(gate): `gate` has a column of buffer `gates` for each column of `in`, from `first`
   on, or with `wide` 1 one column for all. `in` may be `out`. */
PDK_API int64_t pdk_op_sigmoid(pdk_program* p, int64_t in, int64_t gates, int64_t first, int64_t wide, int64_t out,
                               int64_t add);
/* The mixer of a GatedDeltaNet layer (arXiv:2412.06464). Columns of `in`: q and k [key_heads][key_dim], v and z
   [value_heads][value_dim], b and a [value_heads]. conv [taps][columns of q, k and v]: depthwise convolution, then
   silu. decay, bias [value_heads]: a state decays by exp(decay * softplus(a + bias)). out [value_heads * value_dim] =
   the output, normalised by `norm` [value_dim], times silu(z). Rows that begin at position 0 begin with a state of
   zero. Key and value dims are multiples of 16. A row without tokens only folds.

   `gates` -1: as above. Otherwise it is Kimi Delta Attention (arXiv:2510.26692), where each row of a state has a decay.
   Columns of `in` are then q, k, v and b, and those of buffer `gates` are a [value_heads][key_dim] and z. bias is
   [value_heads][key_dim], and the normalised output is multiplied by sigmoid(z). */
PDK_API int64_t pdk_op_delta(pdk_program* p, const pdk_states* states, int64_t in, int64_t gates, const float* conv,
                             const float* decay, const float* bias, const float* norm, float eps, int64_t out);
/* From logits [num_experts] to int64 buffer `experts` [top_k], best first, and their `weights` [top_k]. */
PDK_API int64_t pdk_op_route(pdk_program* p, int64_t logits, const pdk_routing* how, int64_t experts, int64_t weights);
/* out = (with add +=) the sum of a token's `experts`, down(act(gate, up)) of its row of `in`, times their `weights`.
   The row is normalised when `norm` is not NULL. `gate_up` and `down` have `num_experts` experts one after the other;
   gate and up are the parts of `gate_up`. act and limit: see pdk_op_gated. `counts` [num_experts] or NULL: incremented
   by the tokens routed to each expert. */
PDK_API int64_t pdk_op_experts(pdk_program* p, int64_t in, const float* norm, float eps, int64_t experts,
                               int64_t weights, int64_t num_experts, const pdk_weights* gate_up,
                               const pdk_weights* down, int64_t act, float limit, int64_t* counts, int64_t out,
                               int64_t add);
/* out += scale * in, `in` being normalised when `norm` is not NULL. */
PDK_API int64_t pdk_op_add(pdk_program* p, int64_t in, const float* norm, float eps, float scale, int64_t out);
/* x = softcap * tanh(scale * x / softcap) for all items of a buffer; softcap 0: x = scale * x. */
PDK_API int64_t pdk_op_cap(pdk_program* p, int64_t buffer, float scale, float softcap);
PDK_API int64_t pdk_op_select(pdk_program* p, int64_t in, int64_t out);
/* int64 buffer `out`, of one item: the index of the maximum of each sample's row of `in`; ties go to the lower index.
   */
PDK_API int64_t pdk_op_argmax(pdk_program* p, int64_t in, int64_t out);

/* Operation `op`, of pdk_op_linear or pdk_op_gated over tokens, has adapters: it is layer `site` of them. */
PDK_API int64_t pdk_adapt(pdk_program* p, int64_t op, int64_t site);

/* Begins a step and sizes the buffers. The arrays of `step` must stay valid until the last operation has run. */
PDK_API int64_t pdk_begin(pdk_program* p, const pdk_step* step);
/* Runs operations [first, last). */
PDK_API void pdk_run(pdk_program* p, int64_t first, int64_t last);
/* Begins a step of decode rows and runs operations [0, last), which leave a token per row in int64 buffer `chosen`.
   Writes each token to `tokens` after the computed one, and to `out` [rows]. Needs a new pdk_begin before any further
   run. */
PDK_API int64_t pdk_decode(pdk_program* p, const pdk_decoding* rows, int64_t last, int64_t chosen, int64_t* out);

#ifdef __cplusplus
}
#endif
#endif
