// AMX products: tiles of up to 16 rows of 64 bytes, multiplied 16 x 16 x 32 bf16 at a time. Included by level.cpp only.
//
// Packed weights have the tile layout already: alternate 64-byte lines of a block are pairs of inputs for 16 outputs.
// The summation order of an output depends on k alone, not on a tile's number of rows. A row's result has the same bits
// in any batch.
#pragma once

constexpr int64_t TILE = 16;            // rows of a tile, and its 32-bit columns
constexpr int64_t DEEP = 32;            // inputs per multiplication
constexpr int64_t STEP = DEEP * BLOCK;  // weights of a block per multiplication

// Configures the tiles during its lifetime: tiles 0 to 4 (four sums, one input) have `rows` rows, tiles 5 to 7 have 16.
class Tiles {
  public:
    explicit Tiles(int64_t rows) : used_(rows > 0) {
        if (!used_) return;
        struct alignas(64) {
            uint8_t palette = 1, start = 0, unused[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {};
        } shapes;
        for (int i = 0; i < 8; i++) shapes.rows[i] = i < 5 ? (uint8_t)rows : TILE;
        asm volatile("" ::"r"(&shapes) : "memory");  // the intrinsic declares only its first bytes as read
        _tile_loadconfig(&shapes);
    }
    ~Tiles() {
        if (used_) _tile_release();
    }
    Tiles(const Tiles&) = delete;

  private:
    const bool used_;
};

// Loads a tile; `passing` data is loaded with a non-temporal hint, because it is not reused soon. This keeps reused
// data in the cache. A macro, because the intrinsics require a literal tile number.
#define LOAD_TILE(passing, index, from, stride)                 \
    do {                                                        \
        if (passing) _tile_stream_loadd(index, (from), stride); \
        else _tile_loadd(index, (from), stride);                \
    } while (0)

// out[r] = sum over k of x[r][k] * w[k][0..32), for the configured number of rows. Strides are in items. BLOCKS: number
// of weight blocks, `w_stride` items apart; their outputs are adjacent. PASSING: weights are loaded as passing.
// `meanwhile` is called in each step, to overlap other work with the tile multiplications. KEEPS (one block only): the
// sums begin with what `out` holds.
template <int BLOCKS, bool PASSING, bool KEEPS = false, class Work>
INLINE void one_tile(const bf16* w, int64_t w_stride, int64_t k, const bf16* x, int64_t x_stride, float* out,
                     int64_t out_stride, Work&& meanwhile) {
    asm volatile("" ::: "memory");  // tile loads do not declare that they read memory
    if (KEEPS) {
        _tile_loadd(0, out, out_stride * 4);
        _tile_loadd(1, out + TILE, out_stride * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
    }
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t c = 0; c < k; c += DEEP, w += STEP) {
        _tile_loadd(4, x + c, x_stride * 2);
        LOAD_TILE(PASSING, 5, w, 128);
        LOAD_TILE(PASSING, 6, w + 32, 128);
        meanwhile();
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 6);
        if (BLOCKS == 2) {
            LOAD_TILE(PASSING, 7, w + w_stride, 128);
            LOAD_TILE(PASSING, 5, w + w_stride + 32, 128);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 4, 5);
        }
    }
    _tile_stored(0, out, out_stride * 4);
    _tile_stored(1, out + TILE, out_stride * 4);
    if (BLOCKS == 2) {
        _tile_stored(2, out + BLOCK, out_stride * 4);
        _tile_stored(3, out + BLOCK + TILE, out_stride * 4);
    }
}

// The same for one block and two tiles of 16 rows, which begin at x and `apart` rows later. PASSING: weights are loaded
// as passing, otherwise x is.
template <bool PASSING, bool KEEPS = false, class Work>
INLINE void two_tiles(const bf16* w, int64_t k, const bf16* x, int64_t x_stride, int64_t apart, float* out,
                      int64_t out_stride, Work&& meanwhile) {
    const bf16* y = x + apart * x_stride;
    float* of_y = out + apart * out_stride;
    asm volatile("" ::: "memory");
    if (KEEPS) {
        _tile_loadd(0, out, out_stride * 4);
        _tile_loadd(1, out + TILE, out_stride * 4);
        _tile_loadd(2, of_y, out_stride * 4);
        _tile_loadd(3, of_y + TILE, out_stride * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t c = 0; c < k; c += DEEP, w += STEP) {
        LOAD_TILE(PASSING, 6, w, 128);
        LOAD_TILE(!PASSING, 4, x + c, x_stride * 2);
        _tile_dpbf16ps(0, 4, 6);
        LOAD_TILE(PASSING, 7, w + 32, 128);
        _tile_dpbf16ps(1, 4, 7);
        LOAD_TILE(!PASSING, 5, y + c, x_stride * 2);
        meanwhile();
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(2, of_y, out_stride * 4);
    _tile_stored(3, of_y + TILE, out_stride * 4);
    _tile_stored(0, out, out_stride * 4);
    _tile_stored(1, out + TILE, out_stride * 4);
}

constexpr int64_t ROW_BYTES = 1 << 20, ROOM_ROWS = 2 * TILE;  // see tile.h
constexpr int64_t TILE_KEYS = 64, MAX_QUERY_ROWS = TILE;      // more keys would overflow the first-level cache
constexpr int64_t NEAR_BYTES = 40 << 10;                      // of weights that stay in the first-level cache
constexpr int64_t UNPACKED = 256;                             // inputs unpacked at a time: 16 KiB of a block

// As in tile.h. The last tile ends with the last row and may overlap the previous tile. int8 is multiplied without
// tiles: its inputs have a scale per 32, and moving partial sums out of a tile costs the time that it saves.
class Multiplier {
  public:
    const int64_t most;
    const bool tiles;

    Multiplier(Format format, int64_t rows)
        : most(format == Format::bf16 ? 2 * TILE : MAX_QUARTER_ROWS), tiles(format == Format::bf16),
          size_(rows < TILE ? rows : TILE), shapes_(tiles ? size_ : 0) {}

    template <class Beside>
    void times(const Weights& w, int64_t block, const Operand& x, int64_t row, int64_t count, const Ask& ask, float* out,
               int64_t stride, Beside& beside) const {
        if (!tiles) {
            times_quarter(w, block, x, row, count, ask, out);
            return;
        }
        const uint8_t* at = w.data + block * block_bytes(w);
        const bf16 *half = (const bf16*)at, *from = x.half + row * w.k, *next = half + ask.bytes / 2;
        const int64_t last = count - size_;  // first row of the last tile
        const auto meanwhile = [&] {
            beside.step();
            for (int i = 0; i < ask.lines; i++, next += 32) __builtin_prefetch(next, 0, NEAREST);
        };
        if (count <= TILE)
            one_tile<1, true>(half, 0, w.k, from + last * w.k, w.k, out + last * stride, stride, meanwhile);
        else if (block_bytes(w) > NEAR_BYTES) two_tiles<true>(half, w.k, from, w.k, last, out, stride, meanwhile);
        else two_tiles<false>(half, w.k, from, w.k, last, out, stride, meanwhile);
    }

    // Whether `count` rows are multiplied by `times_parts`: they are one tile or two, so parts are read only once.
    bool in_parts(int64_t count) const { return tiles && count <= most; }

    // As `times`, for weights that are unpacked. A part of their inputs is in `unpacked`, in the first-level cache, when
    // it is multiplied. Sums are those of whole blocks. `next`: see `unpack`.
    template <class Beside>
    void times_parts(const Weights& w, int64_t block, const Operand& x, int64_t row, int64_t count, bf16* unpacked,
                     const uint8_t* next, float* out, int64_t stride, Beside& beside) const {
        const int64_t last = count - size_;
        const auto meanwhile = [&] { beside.step(); };
        for (int64_t q = 0; q < w.k; q += UNPACKED) {
            const int64_t end = q + UNPACKED < w.k ? q + UNPACKED : w.k, k = end - q;
            const bf16* from = x.half + row * w.k + q;
            unpack(w, block, q, end, unpacked, next);
            if (count <= TILE) {
                float* to = out + last * stride;
                const bf16* own = from + last * w.k;
                if (q) one_tile<1, false, true>(unpacked, 0, k, own, w.k, to, stride, meanwhile);
                else one_tile<1, false>(unpacked, 0, k, own, w.k, to, stride, meanwhile);
            } else if (q) {
                two_tiles<false, true>(unpacked, k, from, w.k, last, out, stride, meanwhile);
            } else {
                two_tiles<false>(unpacked, k, from, w.k, last, out, stride, meanwhile);
            }
        }
    }

    // Prefetches one block of bytes, beginning `from` bytes after its start, spread evenly over all row tiles.
    Ask ask(const Weights& w, int64_t count, int64_t left, int64_t from) const {
        if (!tiles) return ask_by_last(w, count, left, from);
        const int64_t lines = (DEEP - 1) / count + 1;  // a step's weights are DEEP cache lines
        return {(int)lines, from + (count - left) * lines * (w.k / DEEP) * 64};
    }

  private:
    const int64_t size_;  // rows of a tile
    const Tiles shapes_;
};

// As in tile.h, for tiles of at most `rows` rows. One more row after the n rows may be read, and its scores written.
class QueryMultiplier {
  public:
    static constexpr int64_t WIDE = 2 * BLOCK;

    explicit QueryMultiplier(int64_t rows) : tiles_(rows) {}

    // Without KEEPS all rows of a tile are written.
    template <bool KEEPS>
    void times(const bf16* w, int64_t columns, int64_t k, int64_t used, const bf16* x, int64_t x_stride, int64_t n,
               float* out, int64_t out_stride, const float* keep) const {
        if (!KEEPS) return multiply(w, columns, k, used, x, x_stride, out, out_stride);
        alignas(64) float part[TILE * WIDE];
        multiply(w, columns, k, used, x, x_stride, part, WIDE);
        for (int64_t r = 0; r < n; r++)
            for (int64_t d = 0; d < WIDE && d < columns; d += 16) {
                float* to = out + r * out_stride + d;
                store(to, fma(set1(keep[r]), load(to), load(part + r * WIDE + d)));
            }
    }

    void score(const bf16* keys, int64_t wide, int64_t seen, const bf16* q, int64_t, float* scores) const {
        for (int64_t k = 0; k < seen; k += 2 * BLOCK)
            multiply(keys + k * wide, seen - k, wide, wide, q, wide, scores + k, TILE_KEYS);
    }
    void mix(const bf16* values, int64_t count, int64_t seen, const bf16* weights, int64_t n, float* out, int64_t wide,
             const float* keep) const {
        for (int64_t c = 0; c < wide; c += WIDE)
            times<true>(values + c * count, wide - c, count, padded(seen), weights, TILE_KEYS, n, out + c, wide, keep);
    }

  private:
    // Multiplies up to two blocks of k inputs each, the first `used` of them; one block when no more `columns` are
    // left.
    static void multiply(const bf16* w, int64_t columns, int64_t k, int64_t used, const bf16* x, int64_t x_stride,
                         float* out, int64_t out_stride) {
        const auto idle = [] {};
        if (columns > BLOCK) one_tile<2, false>(w, BLOCK * k, used, x, x_stride, out, out_stride, idle);
        else one_tile<1, false>(w, BLOCK * k, used, x, x_stride, out, out_stride, idle);
    }
    const Tiles tiles_;
};
