// Standard headers come first: their inline functions are shared with files that must run on any machine.
#include <array>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels.h"

#pragma GCC target("avx2,fma,f16c")
#include "lanes_avx2.h"

namespace baton {
namespace avx2 {
namespace {
#include "quantize.inl"

#include "tiles.inl"

#include "matmul.inl"
}  // namespace
}  // namespace avx2

const Kernels kAvx2Kernels{avx2::quantize_rows, avx2::multiply_panels};

}  // namespace baton
