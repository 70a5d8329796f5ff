// Standard headers come first: their inline functions are shared with files that must run on any machine.
#include <array>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c,amx-tile,amx-int8,amx-bf16")
#include "lanes_avx512.h"

namespace baton {
namespace amx {
namespace {
using namespace avx512;
#include "tiles.inl"

#include "matmul.inl"

#include "matmul_amx.inl"

constexpr int64_t kLeastRows = 9;  // with fewer, W8A8 is faster without tiles

void multiply_panels_by_tiles(const Weight& weight, const Activations& x, const Output& output, int64_t first_panel, int64_t last_panel,
                              uint8_t* scratch) {
  if (weight.format == WeightFormat::kBf16) {
    multiply_panels_in_tiles<Bf16Tiles, FinishBf16>(weight, x, output, first_panel, last_panel, x.num_columns / 32);
  } else if (weight.format == WeightFormat::kW8A8 && x.num_rows >= kLeastRows) {
    multiply_panels_in_tiles<ByteTiles, FinishW8A8>(weight, x, output, first_panel, last_panel, (x.num_columns + 63) / 64);
  } else {
    kAvx512Kernels.multiply_panels(weight, x, output, first_panel, last_panel, scratch);
  }
}
}  // namespace
}  // namespace amx

const Kernels kAmxKernels{kAvx512Kernels.quantize_rows, amx::multiply_panels_by_tiles};

}  // namespace baton
