// Data structures of the kernels, and the table of kernels that each instruction-set level fills. Plain data, no logic.
//
// `level.cpp` is compiled once per level and fills one `Kernels`; `program.cpp` and `api.cpp` call through it.
// Rows of product operands are padded with zeros to a multiple of 32 columns.
#pragma once
#include <cstdint>

namespace pdk {

using bf16 = uint16_t;

constexpr int64_t BLOCK = 32;  // outputs of a linear layer computed together, and inputs per int8 group
constexpr int64_t CHOICE_BLOCK = 512;  // token weights summed together
constexpr int MAX_GROUP = 128;  // maximum query heads per KV head
constexpr int64_t MAX_DIM = 576;  // maximum head dimension
constexpr int64_t RUN = 16;            // tokens whose keys and values are located together
constexpr int64_t SEGMENT = 128;       // minimum keys of a decode softmax segment: see segment_of
constexpr int64_t MOST_SEGMENTS = 32;  // approximate maximum per query
constexpr int64_t MOST_TILE_KEYS = 128;  // maximum keys of one product of extend
constexpr int64_t TILE_ROWS = 16;        // maximum rows of one product of extend
constexpr int64_t DELTA_CHUNK = 64;      // positions of a prompt that the delta rule takes together
constexpr int64_t DELTA_PENDING = 32;    // maximum pending tokens of a slot: PDK_PENDING

inline int64_t padded(int64_t n) { return (n + BLOCK - 1) / BLOCK * BLOCK; }

// Returns the segment size for a query that sees `keys` keys. One thread adds the segment results, so their number is
// bounded. The size depends on the query's position alone.
inline int64_t segment_of(int64_t keys) {
    int64_t segment = SEGMENT;
    while (segment * MOST_SEGMENTS < keys) segment *= 2;
    return segment;
}

// Returns the floats of a partial decode result of `heads` query heads: maximum score and sum of weights of each,
// padded to a multiple of 16, and the weighted values.
inline int64_t result_floats(int64_t heads, int64_t dim) { return 2 * ((heads + 15) / 16 * 16) + heads * padded(dim); }

enum class Format : int32_t { bf16 = 0, int8 = 1, group4 = 2, group8 = 3, fp8 = 4, mxfp4 = 5 };

// A packed linear layer. bf16: [blocks][k / 2][32][2]. int8: [blocks][k / 4][32][4], each value + 128, with a scale per
// output. group8: the same values, with a scale per output and `group` inputs. group4: values of 4 bits, [blocks][k /
// 4][16][4] bytes, which have output j in the low and output j + 16 in the high bits. `scale` of group4 and group8 is
// [blocks][groups][32], the weight is scale * (value - 8 or 128); with `mins` it is [blocks][groups][2][32], and the
// weight is the first * value + the second. `k` is padded, and `group` is a multiple of 32. `bias` has `blocks * 32`
// entries, or is null.
//
// fp8: codes of E4M3, [blocks][k / 4][32][4] in the order of inputs 0, 2, 1, 3, and scales as those of group8; a weight
// is the product of code and scale, rounded to bf16. mxfp4: for each 32 inputs of a block [32] exponents, int8, and then
// codes of E2M1, [4][2][32] words: word (g, h, 2 * o + i) has, from its lowest bits on, inputs 8 * g + i, + 2, + 4 and
// + 6 of output 16 * h + o; a weight is the code times 2^exponent. `unpack.h` reads both.
struct Weights {
    Format format;
    int64_t blocks, k;
    uint8_t* data;
    float* scale;
    float* bias;
    int64_t group;
    bool mins;
};

// Memory that a thread reads first in the next operation, or null. It is prefetched during the present operation, so
// that memory stays busy while threads wait at the barrier.
struct Soon {
    const uint8_t* at = nullptr;
};

constexpr int64_t MXFP4_BYTES = BLOCK + BLOCK * BLOCK / 2;  // of 32 inputs of a block
inline int64_t block_bytes(const Weights& w) {
    switch (w.format) {
        case Format::bf16: return w.k * BLOCK * 2;
        case Format::group4: return w.k * BLOCK / 2;
        case Format::mxfp4: return w.k / BLOCK * MXFP4_BYTES;
        default: return w.k * BLOCK;
    }
}
// Whether weights are unpacked to bf16, block by block, before they are multiplied.
inline bool is_unpacked(Format format) { return format == Format::fp8 || format == Format::mxfp4; }
inline bool is_grouped(Format format) {
    return format == Format::group4 || format == Format::group8 || format == Format::fp8;
}
// Scales of a block, and the minima beside them.
inline int64_t block_scales(const Weights& w) {
    return is_grouped(w.format) ? (w.k + w.group - 1) / w.group * BLOCK * (w.mins ? 2 : 1) : BLOCK;
}
// The format of the inputs of products with such weights.
inline Format input_format(Format format) {
    return format == Format::bf16 || is_unpacked(format) ? Format::bf16 : Format::int8;
}
// Bytes of scratch for products with such weights: two blocks in bf16.
inline int64_t linear_scratch_bytes(const Weights& w) { return is_unpacked(w.format) ? 2 * w.k * BLOCK * 2 : 0; }

// Input rows of products: bf16 [rows][k], or int8 [rows][k] with a scale per group of 32 columns. `offset` is, per
// group, the negated contribution of the 128 added to the weights.
struct Operand {
    Format format;
    int64_t k;
    bf16* half;
    int8_t* quarter;
    float* scale;
    int32_t* offset;
};

// Returns the operand from `row` on.
inline Operand from(const Operand& x, int64_t row) {
    const int64_t groups = row * x.k / BLOCK;
    if (x.format == Format::bf16) return {x.format, x.k, x.half + row * x.k, nullptr, nullptr, nullptr};
    return {x.format, x.k, nullptr, x.quarter + row * x.k, x.scale + groups, x.offset + groups};
}

enum class Store : int32_t { write = 0, add = 1, gated = 2 };

// What a gated product makes of its gate and up columns: see pdk_op_gated.
enum class Act : int32_t { silu = 0, gelu_tanh = 1, gpt_oss = 2 };

// Destination of a product. `write`, `add`: float [rows][columns], rows `stride` apart; `add` adds `scale` times the
// product. `gated`: each weight block has 16 outputs of gate and 16 of up, blocks come in pairs, and the result of
// `act` goes to `next`.
struct Output {
    Store store;
    float* to;
    int64_t columns, stride;
    Operand next;
    float scale = 1.0f;
    Act act = Act::silu;
    float limit = 0.0f;  // of gpt_oss
    // Added to the product of row r before all else: row places[r] of `changes`, which has the outputs of all blocks, or
    // nothing where that is -1. `changes` null: nothing is added.
    const float* changes = nullptr;
    const int64_t* places = nullptr;
    int64_t change_width = 0;
};

// Output of the q/k/v projection, to be normalised, rotated and written to the query buffer and the pages.
struct Heads {
    const float* qkv;  // [tokens][stride]: first (heads + 2 * kv_heads) * dim columns
    int64_t stride, heads, kv_heads, dim, tokens;
    int64_t half;                  // the first 2 * half columns of a head are rotated
    const float *cos, *sin;        // [tokens][half]
    const float *q_norm, *k_norm;  // [dim] or null; with `whole` [heads * dim] and [kv_heads * dim]
    bool whole;                    // a norm is over all heads together, not over each
    float eps, scale;
    bf16* q;  // [kv_heads][tokens][heads / kv_heads][padded dim], scaled
};

// Where the two columns of a rotated pair lie: in the two halves; beside each other in the inputs and in the halves
// afterwards; or always beside each other.
enum class Pairs : int32_t { halves = 0, parted = 1, beside = 2 };

// Outputs of the projections of an MLA layer, to be normalised, rotated, and written to the query buffer and the pages.
struct Latents {
    const float* absorbed;  // [tokens][heads][rank]: the unrotated part of the queries, as queries over latents
    const float* queries;   // [tokens][heads][nope + rope]: the last `rope` columns are rotated
    const float* down;      // [tokens][rank + rope]: latents before their norm, and the key that all heads share
    int64_t heads, rank, nope, rope;
    int64_t half;            // rope / 2, or 0: nothing is rotated
    const float *cos, *sin;  // [tokens][half]
    const float* norm;       // [rank]
    float eps, scale;
    Pairs pairs;
    bf16* q;  // [tokens][heads][padded (rank + rope)], scaled
};

// Queries and keys of an index (DSA), to be rotated and written to the query buffer and the pages.
struct IndexHeads {
    const float* queries;  // [tokens][heads][dim]
    const float* keys;     // [tokens][dim], before their layer norm
    int64_t heads, dim;
    int64_t half;                // the first 2 * half columns are rotated
    const float *cos, *sin;      // [tokens][half]
    const float *norm, *bias;    // [dim], of the layer norm
    float eps;
    bool beside;  // the columns of a rotated pair are beside each other in the inputs, and in the halves afterwards
    bf16* q;      // [tokens][heads][padded dim]
};

// Number format of keys and values in pages: pdk_heads describes the rows.
enum class KVFormat : int32_t { bf16 = 0, int8 = 1, fp8_e4m3 = 2 };

// The items of bf16 that a row of `dim` values, those of one token and head, takes in a page. `dim` is even.
inline int64_t row_items(KVFormat format, int64_t dim) {
    return format == KVFormat::bf16 ? dim : format == KVFormat::int8 ? ((dim + 3) / 4 * 4 + 4) / 2 : dim / 2;
}

// One layer's keys and values. The key of (page, head, token) is at
// `base + page * page_stride + (head * page_tokens + token) * row`; its value lies `value_offset` items after. `row`:
// see `row_items`.
struct Pages {
    bf16* base;
    int64_t page_stride, value_offset, page_tokens, dim;
    KVFormat format;
    int64_t row;
};

// Sliding window, logit cap and sinks. 0 and null disable each.
struct Mask {
    int64_t window;
    float softcap;
    const float* sinks;  // [heads]
};

// Attention of one layer over a batch of rows.
struct Attention {
    Pages pages;
    Mask mask;
    const bf16* q;  // see Heads
    float* out;     // [tokens][heads * dim]
    int64_t kv_heads, group, tokens;
    const int64_t *starts, *ends, *offsets;  // [rows]: positions [start, end) are new, the first at flat index offset
    const int32_t* table;                    // [rows][table_stride]
    int64_t table_stride;
};

// One piece of attention: queries [first, last) among the row's new tokens, keys [begin, end) of KV heads [head, head +
// heads). `partial` null: the piece writes the final result. Otherwise it leaves partial results there for `merge`: one
// of `result_floats` for all its keys, or with `apart` one per segment. Decode: one query; `heads * group` is at most
// MAX_GROUP. Extend: one head, and no partial result.
struct Piece {
    int64_t row, head, heads, first, last, begin, end;
    float* partial;
    bool apart;
    int64_t segment;  // decode only: see segment_of
};

// A GatedDeltaNet layer over a batch; see pdk_op_delta. Widths are in floats.
struct Delta {
    int64_t key_heads, value_heads, key_dim, value_dim, taps;
    const float* in;  // [tokens][stride]: q, k, v, z, b, a; with `gates` q, k, v, b
    int64_t stride;
    const float* gates;  // [tokens][gate_stride]: a and z, where each row of a state has a decay; null otherwise
    int64_t gate_stride;
    const float *conv, *decay, *bias, *norm;
    float eps;
    float* out;  // [tokens][value_heads * value_dim]
};

// One slot's state of a layer, and its pending tokens; see pdk_states.
struct DeltaState {
    bf16 *conv_q, *conv_k, *conv_v;
    float* state;
    bf16* inputs;                     // [tokens][columns of q, k and v]
    float *keys, *deltas, *decays;    // [tokens][heads][dim]; decays [tokens][heads], or [tokens][heads][key_dim]
};

// One key head, with its value heads, of a row: `tokens` tokens from flat index `offset` and position `start` on. The
// first `prompts` of them are computed in chunks. `folded` pending tokens are added to the state before. `pends`: the
// row has drafts, so its tokens are left pending.
struct DeltaPiece {
    int64_t head, offset, start, tokens, prompts, folded;
    bool pends;
};

struct Kernels {
    const char* name;
    void (*prepare)(const float* x, int64_t stride, int64_t columns, const float* norm, float eps, const Operand& out,
                    int64_t first, int64_t last);
    void (*norm)(const float* x, int64_t columns, const float* weight, float eps, bf16* out, int64_t first,
                 int64_t last);
    // Multiplies rows [0, rows) with blocks [first, last); for a gated product, with pairs of blocks. `scratch` has
    // `linear_scratch_bytes`.
    void (*linear)(const Weights& w, const Operand& x, int64_t rows, int64_t first, int64_t last, const Output& out,
                   const Soon& soon, uint8_t* scratch);
    void (*place)(const Heads& heads, const Pages& pages, const int64_t* write_pages, const int64_t* write_slots,
                  int64_t first, int64_t last);
    // Writes latents, whose pages have one head of rank + rope columns and no values.
    void (*place_latents)(const Latents& latents, const Pages& pages, const int64_t* write_pages,
                          const int64_t* write_slots, int64_t first, int64_t last);
    // Writes index keys, whose pages have one head and no values.
    void (*place_index)(const IndexHeads& heads, const Pages& pages, const int64_t* write_pages,
                        const int64_t* write_slots, int64_t first, int64_t last);
    // Index scores of a piece's queries and keys, lines of `scores` that are `stride` apart; see index.h.
    void (*index_scores)(const Attention& a, const Piece& piece, const float* weights, float scale, float* scores,
                         int64_t stride, uint8_t* scratch);
    // `then`: the decode piece that this thread likely computes next, or null for `soon`. `fresh`: this piece was not
    // announced as a `then`, so nothing of it is prefetched.
    void (*decode)(const Attention& a, const Piece& piece, bool fresh, const Piece* then, const Soon& soon);
    void (*extend)(const Attention& a, const Piece& piece, uint8_t* scratch);
    // Merges `count` partial results of a query in key order; overwrites them.
    void (*merge)(const Attention& a, const Piece& piece, float* partials, int64_t count);
    // out [columns] = (with `add` +=) x * sigmoid(gate); with `one` the gate is a single number.
    void (*sigmoid)(const float* x, const float* gate, bool one, int64_t columns, float* out, bool add);
    // `then`: the first state of the piece that this thread likely computes next.
    void (*delta)(const Delta& d, const DeltaState& state, const DeltaPiece& piece, const Soon& then, uint8_t* scratch);
    int64_t (*argmax)(const float* x, int64_t count);
    // out = e^((x - most) / temperature), and 0 where that is below e^-87. Returns the sum.
    double (*weigh)(const float* x, int64_t count, float most, float temperature, float* out);
    // Sets weights below `floor` to 0; sums: one per CHOICE_BLOCK weights.
    void (*keep)(float* weights, int64_t count, float floor, float* sums);
    void (*widen)(const bf16* x, float scale, float* out, int64_t count);
    // Columns [first, last) of out += scale * x; x [columns] is normalised if `norm` is not null.
    void (*add)(const float* x, int64_t columns, const float* norm, float eps, float scale, float* out, int64_t first,
                int64_t last);
    // x = softcap * tanh(scale * x / softcap); softcap 0: x = scale * x.
    void (*cap)(float* x, int64_t count, float scale, float softcap);
    // out [columns] = (with `add` +=) the weighted sum of `count` rows, those at `places`.
    void (*mix)(const float* rows, int64_t columns, const int64_t* places, const float* weights, int64_t count,
                float* out, bool add);
};

int64_t extend_scratch_bytes(int64_t group, int64_t dim);
int64_t delta_scratch_bytes(int64_t key_dim, int64_t value_dim, int64_t taps, bool by_channel);
int64_t extend_queries(int64_t group);

namespace amx { extern const Kernels kernels; }
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
namespace avx512_bf16 { extern const Kernels kernels; }
namespace zen4 { extern const Kernels kernels; }

}  // namespace pdk
