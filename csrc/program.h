// A program: operations over buffers, put together once and run once a step for any number of tokens.
//
// Owned by whoever opened it through api.cpp. Every operation is run by all threads of the pool at once; each does its
// share, and all meet before the next one begins.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "kernels.h"
#include "pdk.h"
#include "plan.h"
#include "pool.h"

namespace pdk {

// Memory that only grows; what it holds is lost when it does.
class Room {
  public:
    Room() = default;
    ~Room();
    Room(const Room&) = delete;
    void reserve(size_t bytes);
    template <class T>
    T* as() const { return static_cast<T*>(at_); }

  private:
    void* at_ = nullptr;
    size_t bytes_ = 0;
};

struct Buffer {
    int64_t width, item_bytes;
    bool of_samples;
    std::unique_ptr<Room> room;
};

// The tokens of a step by the experts that they go to, and what these work on. One for all mixtures of a program.
struct Routed {
    std::vector<int64_t> starts;  // [experts + 1]: the routes of an expert are [starts[e], starts[e + 1])
    std::vector<int64_t> tokens;  // [routes]: whose each is
    std::vector<int64_t> places;  // [tokens][top_k]: which of the routes are a token's
    Room inputs, gated, outputs;
};

// A step of rows that decode, flattened.
class Decoded {
  public:
    // Valid until the next one is read.
    pdk_step read(const pdk_decoding& rows, int64_t page_tokens);

  private:
    std::vector<int64_t> numbers_;
    std::vector<int32_t> table_;
};

class Program;

// One operation. `run` is called on every thread, `prepare_for` on one before a step, of those that say so.
class Op {
  public:
    virtual ~Op() = default;
    virtual void run(Program& p, int thread) = 0;
    virtual void prepare_for(Program&) {}
    virtual bool prepares() const { return false; }
    // What this thread's share reads first of what no operation has just written; of an operation that reads no such
    // memory, what the next one does.
    virtual Soon first_read(Program& p, int thread) const { return soon(p, thread); }

    Op* next = nullptr;  // the operation behind this one

  protected:
    Soon soon(Program& p, int thread) const { return next ? next->first_read(p, thread) : Soon{}; }
};

class Program {
  public:
    Program(Pool& pool, const Kernels& kernels, const pdk_heads& heads);

    int64_t add(std::unique_ptr<Op> op);
    int64_t add_buffer(int64_t width, int64_t item_bytes, bool of_samples);
    void reserve(int64_t tokens, int64_t samples);
    void begin(const pdk_step& step);
    void run(int64_t first, int64_t last);

    float* floats(int64_t buffer) const { return buffers[buffer].room->as<float>(); }
    // Our share of n things: [first, last).
    void share(int64_t n, int thread, int64_t& first, int64_t& last) const;
    int64_t count(bool of_samples) const { return of_samples ? step.samples : step.tokens; }
    Pages pages_of(int64_t layer) const;
    Attention attention_of(int64_t layer) const;
    // Widest input that an operation asks to have room for.
    void need_operand(int64_t k) { need(operand_width_, k); }
    void need_gated(int64_t k) { need(gated_width_, k); }
    // Operands of `k` columns: prepared together, by one thread for itself, or left by a gated product.
    Operand shared(Format format, int64_t k) const;
    Operand own(Format format, int64_t k, int thread) const;
    Operand gated(Format format, int64_t k) const;
    // An operand that lies in `room`, and the bytes that one takes.
    static Operand operand(const Room& room, Format format, int64_t rows, int64_t k);
    static size_t operand_bytes(int64_t rows, int64_t k);

    Pool& pool;
    const Kernels& kernels;
    const pdk_heads heads;
    pdk_step step{};
    std::vector<Buffer> buffers;
    // The plan for attention with this window; made by `begin` for those that were asked for before.
    Plan& plan_for(int64_t window);
    Room cos, sin, q, partials;
    Routed routed;
    Decoded decoded;
    std::vector<std::unique_ptr<Room>> scratch;  // of each thread

  private:
    void need(int64_t& width, int64_t k) {
        if (k > width) width = k, tokens_ = samples_ = 0;  // room is made anew
    }

    std::vector<std::unique_ptr<Op>> ops_;
    std::vector<Op*> preparing_;  // those of them that want to be told of a step
    std::vector<std::pair<int64_t, std::unique_ptr<Plan>>> plans_;
    int64_t operand_width_ = 0, gated_width_ = 0, tokens_ = 0, samples_ = 0;
    Room shared_, gated_;
    std::vector<std::unique_ptr<Room>> own_;
};

constexpr int64_t OWN_ROWS = 16;  // up to this many rows each thread prepares inputs for itself: cheaper than meeting

}  // namespace pdk
