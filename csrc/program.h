// A program: operations over buffers, recorded once and run once per step for any number of tokens.
//
// Owned by the code that opened it through api.cpp. All threads of the pool run each operation together. Each thread
// does its share, and all threads meet at a barrier before the next operation.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "kernels.h"
#include "lora.h"
#include "pdk.h"
#include "plan.h"
#include "pool.h"
#include "selection.h"

namespace pdk {

// Memory that only grows; growing loses its contents.
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

// The tokens of a step sorted by expert, and the experts' buffers. Shared by all mixtures of a program.
struct Routed {
    std::vector<int64_t> starts;  // [experts + 1]: the routes of expert e are [starts[e], starts[e + 1])
    std::vector<int64_t> tokens;  // [routes]: the token of each route
    std::vector<int64_t> places;  // [tokens][top_k]: the routes of each token
    Room inputs, gated, outputs;
};

// A step of decode rows, flattened.
class Decoded {
  public:
    // The result is valid until the next call.
    pdk_step read(const pdk_decoding& rows, int64_t page_tokens);

  private:
    std::vector<int64_t> numbers_;
    std::vector<int32_t> table_, window_, slots_;
};

// Heads of equal shape, the angles by which they are rotated, and their attention plans by window and top_k.
struct HeadGroup {
    explicit HeadGroup(const pdk_heads& heads) : heads(heads) {}
    const pdk_heads heads;
    int64_t half = 0;  // the first 2 * half columns of a head are rotated
    Room cos, sin;     // [tokens][half]
    std::vector<std::pair<Sight, std::unique_ptr<Plan>>> plans;

    Plan& plan_for(const Sight& sight);
};

// Assigns pieces of work to threads round-robin, so that each thread knows its next piece. A thread without pieces left
// steals from other threads.
class Turns {
  public:
    void reset(int threads);
    // Takes one of `pieces` pieces; returns false when none is left.
    bool take(int thread, int64_t pieces, int64_t& index);

  private:
    struct alignas(64) Taken {
        std::atomic<int64_t> count{0};
    };
    std::vector<Taken> taken_;  // [threads]: begun pieces of each thread's share
};

class Program;

// One operation. All threads call `run`. One thread calls `prepare_for` before a step, if `prepares` is true.
class Op {
  public:
    virtual ~Op() = default;
    virtual void run(Program& p, int thread) = 0;
    virtual void prepare_for(Program&) {}
    virtual bool prepares() const { return false; }
    // Memory that this thread's share reads first and that no operation has just written. An operation without such
    // reads returns that of the next operation.
    virtual Soon first_read(Program& p, int thread) const { return soon(p, thread); }

    Op* next = nullptr;  // the next operation

  protected:
    Soon soon(Program& p, int thread) const { return next ? next->first_read(p, thread) : Soon{}; }
};

class Program {
  public:
    Program(Pool& pool, const Kernels& kernels);

    int64_t add(std::unique_ptr<Op> op);
    Op& op(int64_t number) { return *ops_[number]; }
    int64_t add_heads(const pdk_heads& heads);
    int64_t add_buffer(int64_t width, int64_t item_bytes, bool of_samples);
    void reserve(int64_t tokens, int64_t samples);
    void begin(const pdk_step& step);
    void run(int64_t first, int64_t last);

    float* floats(int64_t buffer) const { return buffers[buffer].room->as<float>(); }
    // The thread's share of n items: [first, last).
    void share(int64_t n, int thread, int64_t& first, int64_t& last) const;
    int64_t count(bool of_samples) const { return of_samples ? step.samples : step.tokens; }
    Pages pages_of(int64_t group, int64_t layer) const;
    Attention attention_of(int64_t group, int64_t layer) const;
    // The selection of layers with this top_k.
    Selection& selection_for(int64_t top_k);
    // The pages to which the step's tokens are written.
    const int64_t* write_pages(int64_t group) const;
    // Raises the maximum input width for which operand buffers are sized.
    void need_operand(int64_t k) { need(operand_width_, k); }
    void need_gated(int64_t k) { need(gated_width_, k); }
    // Raises the bytes of scratch that each thread has.
    void need_scratch(int64_t bytes) { need(scratch_bytes_, bytes); }
    // Operands of `k` columns: prepared by all threads together, prepared by one thread for itself, or left by a gated
    // product.
    Operand shared(Format format, int64_t k) const;
    Operand own(Format format, int64_t k, int thread) const;
    Operand gated(Format format, int64_t k) const;
    // An operand in `room`, and its size in bytes.
    static Operand operand(const Room& room, Format format, int64_t rows, int64_t k);
    static size_t operand_bytes(int64_t rows, int64_t k);

    Pool& pool;
    const Kernels& kernels;
    pdk_step step{};
    std::vector<Buffer> buffers;
    std::vector<std::unique_ptr<HeadGroup>> groups;
    std::vector<std::unique_ptr<Selection>> selections;
    Room q, partials;
    Routed routed;
    Lora lora;
    Decoded decoded;
    std::vector<std::unique_ptr<Room>> scratch;  // one per thread

  private:
    void need(int64_t& width, int64_t k) {
        if (k > width) width = k, tokens_ = samples_ = 0;  // forces the next `reserve` to resize
    }

    std::vector<std::unique_ptr<Op>> ops_;
    std::vector<Op*> preparing_;  // operations whose `prepares` is true
    std::vector<int64_t> window_pages_;  // [tokens]
    int64_t operand_width_ = 0, gated_width_ = 0, scratch_bytes_ = 0, tokens_ = 0, samples_ = 0;
    Room shared_, gated_;
    std::vector<std::unique_ptr<Room>> own_;
};

constexpr int64_t OWN_ROWS = 16;  // up to this many rows each thread prepares its own inputs: no barrier

}  // namespace pdk
