// Packed weights and the memory they lie in. Made by api.cpp, read by operations.
#pragma once
#include <cstddef>
#include <vector>

#include "kernels.h"

namespace pdk {

// Memory in pieces of many megabytes, in huge pages where the system has them: reading weights is what a decode step
// does most. Zeroed; given back when the arena ends.
class Arena {
  public:
    Arena() = default;
    ~Arena();
    Arena(const Arena&) = delete;

    // `bytes` at a multiple of 4096; throws std::bad_alloc.
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

// Rows of a part of the layer that begins at `block`; each of its blocks has as many outputs of each of the `parts`.
void put_rows(const Weights& w, int64_t block, int64_t part, int64_t parts, const bf16* from, int64_t rows, int64_t inputs,
              int64_t stride, const float* bias);

}  // namespace pdk
