// Reads strips of memory, layer by layer, and does nothing with them: what decode attention reads.
//
// Called by kernels.py, which says where the strips lie. Nobody begins a layer before all have ended the one before, as
// in a model.
#include <immintrin.h>
#include <omp.h>

#include <atomic>
#include <cstdint>

typedef uint64_t Line __attribute__((vector_size(64)));

// offsets [bounds[threads]]: bytes from `base` in the first layer, those from bounds[t] on are thread t's; further layers
// lie `layer_bytes` apart. A strip has `strip_bytes`, a multiple of 128, and is asked for while the one `ahead` strips
// before it is read. `found`: all words, combined by exclusive or. False where OpenMP gives fewer threads: nothing is read.
extern "C" bool read_strips(const char* base, const int64_t* offsets, const int64_t* bounds, int64_t strip_bytes,
                            int64_t layers, int64_t layer_bytes, int64_t ahead, int threads, uint64_t* found) {
    std::atomic<int64_t> arrived{0};
    uint64_t all = 0;
    bool complete = true;
#pragma omp parallel num_threads(threads) reduction(^ : all) reduction(&& : complete)
    if (omp_get_num_threads() < threads) {
        complete = false;
    } else {
        const int thread = omp_get_thread_num();
        const int64_t *mine = offsets + bounds[thread], count = bounds[thread + 1] - bounds[thread];
        Line even = {}, odd = {};
        for (int64_t layer = 0; layer < layers; layer++) {
            const char* from = base + layer * layer_bytes;
            for (int64_t i = 0; i < ahead && i < count; i++)
                for (int64_t o = 0; o < strip_bytes; o += 64) _mm_prefetch(from + mine[i] + o, _MM_HINT_T1);
            for (int64_t i = 0; i < count; i++) {
                const char *at = from + mine[i], *next = from + mine[i + ahead < count ? i + ahead : count - 1];
                for (int64_t o = 0; o < strip_bytes; o += 128) {
                    _mm_prefetch(next + o, _MM_HINT_T1);
                    _mm_prefetch(next + o + 64, _MM_HINT_T1);
                    even ^= *reinterpret_cast<const Line*>(at + o);
                    odd ^= *reinterpret_cast<const Line*>(at + o + 64);
                }
            }
            arrived.fetch_add(1);
            while (arrived.load() < (layer + 1) * threads) _mm_pause();
        }
        even ^= odd;
        for (int i = 0; i < 8; i++) all ^= even[i];
    }
    *found = all;
    return complete;
}
