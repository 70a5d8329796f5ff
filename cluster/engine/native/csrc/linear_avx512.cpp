// Standard headers come first: their inline functions are shared with files that must run on any machine.
#include <array>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")
#include "lanes_avx512.h"

namespace baton {
namespace avx512 {
namespace {
#include "quantize.inl"

#include "tiles.inl"

#include "matmul.inl"
}  // namespace
}  // namespace avx512

const Kernels kAvx512Kernels{avx512::quantize_rows, avx512::multiply_panels};

}  // namespace baton
