// Low-rank adapters (LoRA, arXiv:2106.09685) of the rows of a step. Product calls it in steps that have adapters.
//
// Each adapted layer computes low = x A^T for the tokens with adapters, then change = low B^T for the thread's own
// blocks, and the epilogue of the layer's product adds the change. Tokens are grouped by adapter, so that the weights of
// an adapter are read once for all of them. Tokens without an adapter have the bits of a step without adapters.
#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "kernels.h"
#include "pdk.h"

namespace pdk {

class Program;
class Room;
struct Source;

// Tokens that are multiplied together. Changes are kept for one range at a time.
struct TokenRange {
    int64_t first, count;             // tokens
    int64_t first_part, last_part;    // parts [first_part, last_part) belong to it
};

class Lora {
  public:
    // Makes the threads' rooms.
    explicit Lora(int threads);
    ~Lora();

    // Records that a product of a program has adapters: its inputs, padded, and its blocks.
    void adapt(int64_t k, int64_t blocks);
    // Groups the tokens of a step by adapter.
    void begin(const pdk_step& step);
    // Whether an adapter of the step changes layer `site`; -1 is no such layer.
    bool changes(int64_t site) const;
    // Does the thread's share of low = x A^T. Before `change` all threads meet. With source.buffer -1 the inputs are
    // `gated`.
    void lower(Program& p, int64_t site, const Source& source, const Operand& gated, int thread);
    const std::vector<TokenRange>& ranges() const { return ranges_; }
    // Computes blocks [first, last) of the changes of a range's tokens, and sets `out` to add them.
    void change(Program& p, int64_t site, const TokenRange& range, int64_t blocks, int64_t first, int64_t last,
                Output& out, int thread);

  private:
    // Tokens [first, first + count) of `tokens_`, which have one adapter and are in one range.
    struct Part {
        const pdk_adapter* adapter;
        int64_t first, count;
    };
    // Tokens of a part that one thread takes: [first, first + count) of `tokens_`.
    struct Piece {
        const pdk_adapter* adapter;
        int64_t part, first, count;
    };
    Operand low(const pdk_lora& layer, int64_t part, int64_t first) const;
    void gather(Program& p, const Source& source, const Operand& gated, const Piece& piece, const Operand& x,
                float* wide) const;

    const int threads_;
    int64_t widest_input_ = 0, widest_ = 0;        // of the adapted layers: inputs, and blocks
    bool active_ = false;                          // the step has adapters
    std::vector<std::pair<const pdk_adapter*, int64_t>> rows_;  // adapters of the step in order, and a row of each
    std::vector<int64_t> tokens_;                  // the tokens with adapters, by range, then by adapter
    std::vector<int64_t> places_;                  // [tokens of the step]: the token's change in its range, or -1
    std::vector<TokenRange> ranges_;
    std::vector<Part> parts_;
    std::vector<Piece> pieces_;
    int64_t low_width_ = 0;                        // the largest `low` of the step's adapters
    std::unique_ptr<Room> low_, changes_;          // bf16 [tokens][low_width_]; float [RANGE][blocks * 32]
    std::vector<std::unique_ptr<Room>> own_;       // of each thread: inputs and lows of a piece
};

}  // namespace pdk
