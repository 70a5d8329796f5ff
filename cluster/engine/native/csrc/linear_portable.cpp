// Standard headers come first: their inline functions are shared with files that must run on any machine.
#include <array>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels.h"

#include "lanes_portable.h"

namespace baton {
namespace portable {
namespace {
#include "quantize.inl"

#include "tiles.inl"

#include "matmul.inl"
}  // namespace
}  // namespace portable

const Kernels kPortableKernels{portable::quantize_rows, portable::multiply_panels};

}  // namespace baton
