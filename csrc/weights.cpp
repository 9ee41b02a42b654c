// See weights.h. The layouts are described in kernels.h.
#include "weights.h"

#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <new>

namespace pdk {
namespace {

constexpr size_t HUGE_PAGE = 2u << 20, PIECE = 32u << 20, PAGE = 4096;

size_t up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

float wide(bf16 x) {
    const uint32_t u = static_cast<uint32_t>(x) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

void put_half(const Weights& w, int64_t block, int64_t lane, const bf16* row, int64_t inputs) {
    bf16* to = reinterpret_cast<bf16*>(w.data) + block * w.k * BLOCK + lane * 2;
    for (int64_t q = 0; q < inputs; q++) to[q / 2 * 64 + q % 2] = row[q];
}

// Symmetric quantization with one scale per output.
void put_quarter(const Weights& w, int64_t block, int64_t lane, const bf16* row, int64_t inputs) {
    float most = 0.0f;
    for (int64_t q = 0; q < inputs; q++) most = std::fmax(most, std::fabs(wide(row[q])));
    const float scale = most / 127.0f, inverse = most > 0.0f ? 127.0f / most : 0.0f;
    uint8_t* to = w.data + block * w.k * BLOCK + lane * 4;
    for (int64_t q = 0; q < inputs; q++)
        to[q / 4 * 128 + q % 4] = static_cast<uint8_t>(std::lrintf(wide(row[q]) * inverse) + 128);
    w.scale[block * BLOCK + lane] = scale;
}

}  // namespace

Arena::~Arena() {
    for (const Piece& piece : pieces_) munmap(piece.at, piece.bytes);
}

void* Arena::take(size_t bytes) {
    bytes = up(bytes, PAGE);
    if (left_ < bytes) {
        const size_t size = up(bytes > PIECE ? bytes : PIECE, HUGE_PAGE) + HUGE_PAGE;
        void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED) throw std::bad_alloc();
        pieces_.push_back({at, size});
        next_ = reinterpret_cast<char*>(up(reinterpret_cast<size_t>(at), HUGE_PAGE));
        left_ = size - HUGE_PAGE;
        madvise(next_, left_, MADV_HUGEPAGE);
    }
    void* got = next_;
    next_ += bytes;
    left_ -= bytes;
    taken_ += static_cast<int64_t>(bytes);
    return got;
}

void put_rows(const Weights& w, int64_t block, int64_t part, int64_t parts, const bf16* from, int64_t rows, int64_t inputs,
              int64_t stride, const float* bias) {
    const int64_t each = BLOCK / parts;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = block + r / each, lane = part * each + r % each;
        (w.format == Format::bf16 ? put_half : put_quarter)(w, at, lane, from + r * stride, inputs);
        if (bias) w.bias[at * BLOCK + lane] = bias[r];
    }
}

// Writes an output's codes and exponents; see kernels.h.
static void put_mxfp4(const Weights& w, int64_t block, int64_t lane, const uint8_t* codes, const float* scale,
                      int64_t inputs) {
    for (int64_t q = 0; q < inputs; q++) {
        uint8_t* to = w.data + block * block_bytes(w) + q / BLOCK * MXFP4_BYTES;
        const int64_t i = q % BLOCK, plane = i % 8 / 2;
        to[lane] = static_cast<uint8_t>(std::ilogb(scale[q / BLOCK]));
        uint8_t& byte = to[BLOCK + (i / 8 * 2 + lane / 16) * 64 + (lane % 16 * 2 + i % 2) * 2 + plane / 2];
        byte = static_cast<uint8_t>(plane % 2 ? (byte & 0x0f) | codes[q] << 4 : (byte & 0xf0) | codes[q]);
    }
}

void put_values(const Weights& w, int64_t block, int64_t part, int64_t parts, const Values& from, int64_t rows,
                int64_t inputs, const float* bias) {
    constexpr int64_t IN_ORDER[] = {0, 1, 2, 3}, FP8_ORDER[] = {0, 2, 1, 3};
    const int64_t* order = w.format == Format::fp8 ? FP8_ORDER : IN_ORDER;
    const bool four = w.format == Format::group4, grouped = is_grouped(w.format);
    const int64_t each = BLOCK / parts, groups = grouped ? (inputs + w.group - 1) / w.group : 1;
    const int64_t wide = w.mins ? 2 * BLOCK : BLOCK;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = block + r / each, lane = part * each + r % each;
        const uint8_t* value = from.values + r * inputs;
        if (bias) w.bias[at * BLOCK + lane] = bias[r];
        if (w.format == Format::mxfp4) {
            put_mxfp4(w, at, lane, value, from.scale + r * (padded(inputs) / BLOCK), inputs);
            continue;
        }
        uint8_t* to = w.data + at * block_bytes(w) + (four ? lane % 16 : lane) * 4;
        for (int64_t q = 0; q < inputs; q++) {
            if (!four) to[q / 4 * 128 + order[q % 4]] = value[q];
            else if (lane < 16) to[q / 4 * 64 + q % 4] = (to[q / 4 * 64 + q % 4] & 0xf0) | value[q];
            else to[q / 4 * 64 + q % 4] = static_cast<uint8_t>((to[q / 4 * 64 + q % 4] & 0x0f) | value[q] << 4);
        }
        float* scale = w.scale + at * block_scales(w) + lane;
        for (int64_t g = 0; g < groups; g++) {
            scale[g * wide] = from.scale[r * groups + g];
            if (w.mins) scale[g * wide + BLOCK] = from.mins[r * groups + g];
        }
    }
}

}  // namespace pdk
