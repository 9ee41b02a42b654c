// Packed weights and their memory. Made by api.cpp, read by operations.
#pragma once
#include <cstddef>
#include <vector>

#include "kernels.h"

namespace pdk {

// Memory in chunks of many megabytes, in huge pages where the system has them: a decode step mostly reads weights.
// Zeroed; freed when the arena ends.
class Arena {
  public:
    Arena() = default;
    ~Arena();
    Arena(const Arena&) = delete;

    // Allocates `bytes` at a multiple of 4096; throws std::bad_alloc.
    void* take(size_t bytes);
    int64_t bytes() const { return taken_; }

  private:
    struct Piece {
        void* at;
        size_t bytes;
    };
    std::vector<Piece> pieces_;
    char* next_ = nullptr;
    size_t left_ = 0;
    int64_t taken_ = 0;
};

// Packs rows of a part of the layer that begins at `block`; each block has the same number of outputs of each part.
void put_rows(const Weights& w, int64_t block, int64_t part, int64_t parts, const bf16* from, int64_t rows, int64_t inputs,
              int64_t stride, const float* bias);

// Values of each output and input, and scales and minima of each output and group; `mins` is null without them.
struct Values {
    const uint8_t* values;
    const float *scale, *mins;
};

// The same for weights that are values already, or codes. Of int8 all inputs are one group. Scales of mxfp4 are powers
// of two, from 2^-125 to 2^125.
void put_values(const Weights& w, int64_t block, int64_t part, int64_t parts, const Values& from, int64_t rows,
                int64_t inputs, const float* bias);

}  // namespace pdk
