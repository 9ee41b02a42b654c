// Threads that compute together. Owned by the code that opened it; one program runs at a time.
//
// A thread without work sleeps on a futex, but stays awake for a moment after a run, because a step may have several
// runs. Within a run threads meet at barriers every few microseconds, so they spin there for a limited time. A spinning
// thread yields its core again and again: other processes of the server need a core briefly to deliver tokens, and
// would wait until the step is over. A process that computes as well would take a slice of milliseconds at each
// barrier. After one such slice the thread stops yielding for a while.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace pdk {

class Pool {
  public:
    Pool(int threads, const int64_t* cpus);
    ~Pool();
    Pool(const Pool&) = delete;

    int size() const { return threads_; }

    // Wakes the threads for a run that is about to begin; waking takes tens of microseconds.
    void rouse();

    // Calls work(argument, thread) on every thread, the caller being thread 0, and returns when all are done.
    void run(void (*work)(void*, int), void* argument);

    // Waits for all threads of the run (barrier).
    void meet();

  private:
    void serve(int thread);
    static void pin(int64_t cpu);

    const int threads_;
    std::mutex one_run_;
    std::vector<std::thread> helpers_;
    void (*work_)(void*, int) = nullptr;
    void* argument_ = nullptr;
    bool closing_ = false;
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<uint32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
    std::atomic<uint32_t> idle_{0}, late_{0};  // threads that sleep between runs, or at a barrier
};

}  // namespace pdk
