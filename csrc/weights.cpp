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

}  // namespace pdk
