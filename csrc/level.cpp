// All kernels, compiled once per instruction-set level (named by PDK_LEVEL) and reached through its `Kernels`.
//
// The linker must not share code between levels. All functions are therefore static, and no standard library templates
// are used.
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))

namespace pdk {
namespace PDK_LEVEL {

// Prefetch settings. NEAREST: the cache that prefetches target; 3: first level, 2: second level. FOUND_ROWS: up to this
// many rows the hardware prefetcher finds the next block of weights. Zen 4's first-level cache has few outstanding
// misses: prefetches from memory would block those served by the second level. On Zen 5 decode attention needs
// NEAREST 3; on Xeons with AMX it is a tenth faster with NEAREST 2.
#if defined(PDK_ZEN4)
constexpr int NEAREST = 2, FOUND_ROWS = 4;
#elif defined(PDK_AMX)
constexpr int NEAREST = 2, FOUND_ROWS = 0;
#else
constexpr int NEAREST = 3, FOUND_ROWS = 0;
#endif

#ifdef __AVX512F__
#include "vec512.h"
#else
#include "vec256.h"
#endif
#include "rows.h"
#include "tile.h"
#include "unpack.h"
#ifdef PDK_AMX
#include "amx.h"
#endif
#include "linear.h"
#include "codes.h"
#include "heads.h"
#include "place_latents.h"
#include "runs.h"
#include "decode.h"
#include "extend.h"
#include "index.h"
#include "delta_rule.h"
#include "delta_channels.h"
#include "delta_pending.h"

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
extern const Kernels kernels;
const Kernels kernels = {TEXT(PDK_LEVEL), prepare, norm_rows, linear, place, place_latents, place_index,
                         index_scores,    decode,  extend,    merge,  gate,  delta,         argmax,
                         weigh,           keep,    widen,     add,    cap,   mix};

}  // namespace PDK_LEVEL
}  // namespace pdk
