// See pool.h.
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace pdk {
namespace {

constexpr int SPINS = 4000;   // about 50 microseconds
constexpr int YIELDS = 100;   // then the core is offered to others
inline void relax() { __builtin_ia32_pause(); }

void sleep_on(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}

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
    wake_all(epoch_);
    for (auto& helper : helpers_) helper.join();
}

void Pool::pin(int64_t cpu) {
    if (cpu < 0) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof(set), &set);  // a core that is gone is no reason to stop
}

void Pool::run(void (*work)(void*, int), void* argument) {
    std::lock_guard lock(one_run_);
    if (threads_ == 1) return work(argument, 0);
    work_ = work;
    argument_ = argument;
    epoch_.fetch_add(1);
    wake_all(epoch_);
    work(argument, 0);
    meet();
}

void Pool::serve(int thread) {
    uint32_t seen = 0;
    while (true) {
        while (epoch_.load(std::memory_order_acquire) == seen) sleep_on(epoch_, seen);
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
        if (sleepers_.load()) wake_all(round_);
        return;
    }
    for (int i = 0; i < SPINS; i++) {
        if (round_.load(std::memory_order_acquire) != round) return;
        relax();
    }
    for (int i = 0; i < YIELDS; i++) {
        if (round_.load(std::memory_order_acquire) != round) return;
        sched_yield();
    }
    sleepers_.fetch_add(1);
    while (round_.load() == round) sleep_on(round_, round);
    sleepers_.fetch_sub(1);
}

}  // namespace pdk
