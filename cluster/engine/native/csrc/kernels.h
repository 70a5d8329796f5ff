// What one instruction set implements of the linears; plain structs only, so that no inline function is compiled for several sets.
#pragma once

#include "activations.h"
#include "linear.h"

namespace baton {

// Panels that are multiplied in turn, and room for them with a byte a weight and scales and minima in groups of 32.
constexpr int64_t kBlockPanels = 8;
constexpr int64_t kScratchBytes = kBlockPanels * (kPanelColumns + 4);

struct Kernels {
  // Rows first_row … last_row - 1; `scratch` has room for one row of floats.
  void (*quantize_rows)(const Source&, const Activations&, int64_t first_row, int64_t last_row, float* scratch);
  // Panels first_panel … last_panel - 1, all rows. `scratch` is kScratchBytes for each input, 64-byte aligned.
  void (*multiply_panels)(const Weight&, const Activations&, const Output&, int64_t first_panel, int64_t last_panel, uint8_t* scratch);
};

extern const Kernels kPortableKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAmxKernels;

}  // namespace baton
