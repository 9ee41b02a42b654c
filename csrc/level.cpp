// All kernels, compiled once for each instruction-set level (PDK_LEVEL names it) and reached through its `Kernels`.
//
// Nothing here may be shared between levels by the linker: all functions are static, no templates of the standard
// library are used.
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))

namespace pdk {
namespace PDK_LEVEL {

// How memory that comes next is asked for. NEAREST: the nearest cache that it is brought to, 3: the first, 2: the second.
// FOUND_ROWS: while so few rows are multiplied the CPU finds the next block of weights by itself. Zen 4's first-level
// cache waits for few lines at a time: with what comes from memory it has none left for what lies in the second. On Zen 5
// decode attention needs it; on Xeons with AMX it is a tenth faster without.
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
#ifdef PDK_AMX
#include "amx.h"
#endif
#include "linear.h"
#include "heads.h"
#include "runs.h"
#include "decode.h"
#include "extend.h"

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
extern const Kernels kernels;
const Kernels kernels = {TEXT(PDK_LEVEL), prepare, norm_rows, linear, place, decode,
                         extend,          merge,   argmax,    weigh,  keep,   widen, mix};

}  // namespace PDK_LEVEL
}  // namespace pdk
