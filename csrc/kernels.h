// What kernels work on, and the table of kernels that each instruction-set level fills. Plain data, no logic.
//
// `level.cpp` is compiled once per level and fills one `Kernels`; `program.cpp` and `api.cpp` call through it.
// All rows are padded with zeros to a multiple of 32 columns where an operand of a product is meant.
#pragma once
#include <cstdint>

namespace pdk {

using bf16 = uint16_t;

constexpr int64_t BLOCK = 32;  // outputs of a linear layer that are computed together, and inputs per int8 group
constexpr int64_t CHOICE_BLOCK = 512;  // weights of tokens that are summed up together
constexpr int MAX_GROUP = 64;  // most query heads of one KV head
constexpr int64_t MAX_DIM = 512;  // largest head
constexpr int64_t RUN = 16;            // tokens whose keys and values are found together
constexpr int64_t SEGMENT = 128;       // keys that decode makes a softmax of alone, or more: see segment_of
constexpr int64_t MOST_SEGMENTS = 32;  // of one query, about
constexpr int64_t MOST_TILE_KEYS = 128;  // at most, of one product of extend
constexpr int64_t TILE_ROWS = 16;        // rows that it has at most

inline int64_t padded(int64_t n) { return (n + BLOCK - 1) / BLOCK * BLOCK; }

// Keys of each segment of a query that sees so many. Results of segments are added by one thread, so there must not be too
// many; and how many follows from nothing but the query's place.
inline int64_t segment_of(int64_t keys) {
    int64_t segment = SEGMENT;
    while (segment * MOST_SEGMENTS < keys) segment *= 2;
    return segment;
}

// Floats of what decode knows of so many query heads: the largest score and the sum of weights of each, padded to a
// multiple of 16, and the weighted values.
inline int64_t result_floats(int64_t heads, int64_t dim) { return 2 * ((heads + 15) / 16 * 16) + heads * padded(dim); }

enum class Format : int32_t { bf16 = 0, int8 = 1 };

// A packed linear layer. bf16: [blocks][k / 2][32][2]. int8: [blocks][k / 4][32][4], each value + 128, and for
// every output a scale. `k` is padded, `bias` has `blocks * 32` entries or is null.
struct Weights {
    Format format;
    int64_t blocks, k;
    uint8_t* data;
    float* scale;
    float* bias;
};

// Memory that a thread will read first in the operation behind this one, or null: it is asked for while this one still
// computes, so that memory is busy while threads meet.
struct Soon {
    const uint8_t* at = nullptr;
};

inline int64_t block_bytes(const Weights& w) { return w.k * BLOCK * (w.format == Format::bf16 ? 2 : 1); }

// Rows that go into products: bf16 [rows][k], or int8 [rows][k] with a scale per group of 32 and, for each group, the
// sum that the 128 in the weights adds, negated.
struct Operand {
    Format format;
    int64_t k;
    bf16* half;
    int8_t* quarter;
    float* scale;
    int32_t* offset;
};

enum class Store : int32_t { write = 0, add = 1, swiglu = 2 };

// What becomes of a product. `write`, `add`: float [rows][columns], rows `stride` apart. `swiglu`: of the
// weights each block has 16 outputs of gate and 16 of up, and there are pairs of blocks; what is made of them is `next`.
struct Output {
    Store store;
    float* to;
    int64_t columns, stride;
    Operand next;
};

// Q, K and V as products left them, to be normalised, rotated and put in their places.
struct Heads {
    const float* qkv;  // [tokens][(heads + 2 * kv_heads) * dim]
    int64_t heads, kv_heads, dim, tokens;
    const float *cos, *sin;        // [tokens][dim / 2]
    const float *q_norm, *k_norm;  // [dim] or null
    float eps, scale;
    bf16* q;  // [kv_heads][tokens][heads / kv_heads][padded dim], scaled
};

// One layer's keys and values. Element (page, token, dim) of a head's keys is at
// `base + page * page_stride + head * page_tokens * dim + token * dim + d`; values lie `value_offset` further.
struct Pages {
    bf16* base;
    int64_t page_stride, value_offset, page_tokens, dim;
};

// What a query sees of its row, and how scores are bent. 0 and null: not at all.
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

// One piece of it: queries [first, last) among the row's new tokens, keys [begin, end) of KV heads [head, head + heads).
// `partial` null: the result is written; else the piece leaves it there for `merge`, one of `result_floats` for all of its
// keys, or with `apart` one for each segment. Decode: one query, and `heads * group` is at most MAX_GROUP. Extend: one
// head, and no partial.
struct Piece {
    int64_t row, head, heads, first, last, begin, end;
    float* partial;
    bool apart;
    int64_t segment;  // decode: see segment_of
};

struct Kernels {
    const char* name;
    void (*prepare)(const float* x, int64_t stride, int64_t columns, const float* norm, float eps, const Operand& out,
                    int64_t first, int64_t last);
    void (*norm)(const float* x, int64_t columns, const float* weight, float eps, bf16* out, int64_t first,
                 int64_t last);
    // Rows [0, rows) times blocks [first, last); for swiglu, pairs of blocks.
    void (*linear)(const Weights& w, const Operand& x, int64_t rows, int64_t first, int64_t last, const Output& out,
                   const Soon& soon);
    void (*place)(const Heads& heads, const Pages& pages, const int64_t* write_pages, const int64_t* write_slots,
                  int64_t first, int64_t last);
    // `then`, or null: a piece of decode that this thread is likely to be given next, else `soon`. `fresh`: this one was
    // no such.
    void (*decode)(const Attention& a, const Piece& piece, bool fresh, const Piece* then, const Soon& soon);
    void (*extend)(const Attention& a, const Piece& piece, uint8_t* scratch);
    // The result of a query from `count` partial ones, in the order of keys, which are lost.
    void (*merge)(const Attention& a, const Piece& piece, float* partials, int64_t count);
    int64_t (*argmax)(const float* x, int64_t count);
    // out = e^((x - most) / temperature), 0 where that is below e^-87; returns their sum.
    double (*weigh)(const float* x, int64_t count, float most, float temperature, float* out);
    // Weights below `floor` become 0; sums: of each CHOICE_BLOCK weights.
    void (*keep)(float* weights, int64_t count, float floor, float* sums);
    void (*widen)(const bf16* x, float* out, int64_t count);
    // out [columns] = (with `add` +=) the sum of `count` rows, those at `places`, times their weights.
    void (*mix)(const float* rows, int64_t columns, const int64_t* places, const float* weights, int64_t count,
                float* out, bool add);
};

int64_t extend_scratch_bytes(int64_t group, int64_t dim);
int64_t extend_queries(int64_t group);

namespace amx { extern const Kernels kernels; }
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
namespace avx512_bf16 { extern const Kernels kernels; }
namespace zen4 { extern const Kernels kernels; }

}  // namespace pdk
