// What one instruction set implements of the linears; plain structs only, so that no inline function is compiled for several sets.
#pragma once

#include "activations.h"
#include "linear.h"

namespace baton {

struct Kernels {
  // Rows first_row … last_row - 1; `scratch` has room for one row of floats.
  void (*quantize_rows)(const Source&, const Activations&, int64_t first_row, int64_t last_row, float* scratch);
  // Panels first_panel … last_panel - 1, all rows.
  void (*multiply_panels)(const Weight&, const Activations&, const Output&, int64_t first_panel, int64_t last_panel);
};

extern const Kernels kPortableKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAmxKernels;

}  // namespace baton
