// out[row][n] = sum over k of activations[row][k] × weight[n][k], for packed weights of several formats.
#pragma once

#include <cstdint>

#include "activations.h"

namespace baton {

enum class WeightFormat : int32_t {
  kW8A8,   // int8, one scale an output channel; activations with one scale a row
  kW8G32,  // int8 in groups of 32 with a float16 scale; activations in groups of 32
  kW4A8,   // 4 bit in groups of 32 with float16 scale and minimum; activations in groups of 32
  kBf16,   // bfloat16; activations rounded to bfloat16
};

// Columns of the output in one panel of packed weights: two vectors of 16. limits.py says the same.
constexpr int64_t kPanelColumns = 32;

// Panels follow each other, each one stream of memory, the last filled up with zeros. A vector of 64 bytes holds 4 bytes along k for
// each of 16 output columns; the two vectors of a panel alternate. See `packing.py`, which writes them.
struct Weight {
  WeightFormat format;
  int64_t num_outputs;
  int64_t num_inputs;     // a multiple of 32
  const uint8_t* panels;  // 64-byte aligned
  const float* bias;      // [num_outputs], or null
};

struct Output {
  float* values;
  int64_t row_stride;  // in floats
  bool accumulate;     // add to what is there
};

ActivationKind activation_kind(WeightFormat format);
int64_t panel_bytes(WeightFormat format, int64_t num_inputs);

// The bits of an output row depend on that row's activations alone.
void matmul(const Weight& weight, const Activations& activations, const Output& output);

// Quantizes into memory of the calling thread, then multiplies.
void linear(const Weight& weight, const Source& source, int64_t num_rows, const Output& output);

}  // namespace baton
