// Threads that compute together. Owned by whoever opened it; one program runs at a time.
//
// A thread without work sleeps on a futex, but stays awake for a moment behind a run: a step may have several. Within a
// run threads meet at barriers every few microseconds, so there they spin, but for a while only, and who spins offers its
// core to others again and again: the server's other processes have tokens to deliver, briefly, and on cores that all
// compute they would wait for one until the step is over. Somebody who computes as well would take a slice of
// milliseconds at each barrier, so after one the core is kept for a while.
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

    // Wakes the threads for a run that is about to begin: waking takes them tens of microseconds.
    void rouse();

    // Calls work(argument, thread) on every thread, the caller being thread 0, and returns when all are done.
    void run(void (*work)(void*, int), void* argument);

    // Waits for all threads of the run.
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
    std::atomic<uint32_t> idle_{0}, late_{0};  // who sleeps until there is a run, or at a barrier
};

}  // namespace pdk
