// See pool.h.
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>

namespace pdk {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int OFFERS = 200, OFFERS_IDLE = 50;  // yields before a thread sleeps: about 200 and 50 microseconds
constexpr int SPINS_PER_OFFER = 20;  // enough for most barriers
constexpr auto LONG = std::chrono::microseconds(1500);
constexpr auto KEPT = std::chrono::milliseconds(10);

// Yields this core, unless the last yield lost it for long.
void offer_core() {
    thread_local Clock::time_point keeps_until{};
    const auto before = Clock::now();
    if (before < keeps_until) return;
    sched_yield();
    const auto after = Clock::now();
    if (after - before > LONG) keeps_until = after + KEPT;
}

void wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}

// Waits while `word` is `value`: spins for `offers` yields, then sleeps until woken.
void wait_while(std::atomic<uint32_t>& word, uint32_t value, int offers, std::atomic<uint32_t>& sleepers) {
    for (int i = 0; i < offers; i++) {
        for (int k = 0; k < SPINS_PER_OFFER; k++) {
            if (word.load(std::memory_order_acquire) != value) return;
            __builtin_ia32_pause();
        }
        offer_core();
    }
    sleepers.fetch_add(1);
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
    sleepers.fetch_sub(1);
}

// The calling thread computes with denormal numbers as 0 while this lives. The decays within a chunk of a gated delta
// rule reach them, and arithmetic on one takes a hundred times as long.
class NoDenormals {
  public:
    NoDenormals() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before_ | TO_ZERO | ARE_ZERO); }
    ~NoDenormals() { __builtin_ia32_ldmxcsr(before_); }
    NoDenormals(const NoDenormals&) = delete;

  private:
    static constexpr unsigned TO_ZERO = 1u << 15, ARE_ZERO = 1u << 6;  // results and operands
    const unsigned before_;
};

}  // namespace

Pool::Pool(int threads, const int64_t* cpus) : threads_(threads) {
    for (int t = 1; t < threads; t++)
        helpers_.emplace_back([this, t, cpu = cpus ? cpus[t - 1] : -1] {
            pin(cpu);
            serve(t);
        });
}

Pool::~Pool() {
    closing_ = true;
    epoch_.fetch_add(1);
    rouse();
    for (auto& helper : helpers_) helper.join();
}

void Pool::pin(int64_t cpu) {
    if (cpu < 0) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof(set), &set);  // best effort: the core may be unavailable
}

void Pool::rouse() {
    if (idle_.load()) wake_all(epoch_);
}

void Pool::run(void (*work)(void*, int), void* argument) {
    std::lock_guard lock(one_run_);
    const NoDenormals mode;
    if (threads_ == 1) return work(argument, 0);
    work_ = work;
    argument_ = argument;
    epoch_.fetch_add(1);
    rouse();
    work(argument, 0);
    meet();
}

void Pool::serve(int thread) {
    const NoDenormals mode;
    uint32_t seen = 0;
    while (true) {
        while (epoch_.load(std::memory_order_acquire) == seen) wait_while(epoch_, seen, OFFERS_IDLE, idle_);
        seen++;
        if (closing_) return;
        work_(argument_, thread);
        meet();
    }
}

void Pool::meet() {
    if (threads_ == 1) return;
    const uint32_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(threads_)) {
        arrived_.store(0, std::memory_order_relaxed);
        round_.store(round + 1);
        if (late_.load()) wake_all(round_);
        return;
    }
    while (round_.load(std::memory_order_acquire) == round) wait_while(round_, round, OFFERS, late_);
}

}  // namespace pdk
