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

#ifdef __AVX512F__
#include "vec512.h"
#else
#include "vec256.h"
#endif
#include "rows.h"
#include "tile.h"
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
