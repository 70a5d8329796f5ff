// Rows of activations as the matrix kernels read them, and where they come from.
#pragma once

#include <cstdint>

namespace baton {

enum class ActivationKind : int32_t {
  kTokenInt8,  // one scale a row; levels -127…127 stored as unsigned bytes with zero point 128, or signed ones for AVX2
  kGroupInt8,  // one scale for 32 values; levels are signed bytes
  kBf16,
};

constexpr int64_t kGroupSize = 32;  // limits.py says the same

// Sums of products of a group start from these bits of the float 3 × 2^22: with an integer added they are that float plus the integer.
constexpr int32_t kSumOrigin = 0x4b400000;

// Views into one block of memory of `activation_bytes`, 64-byte aligned. Rows are padded so that a tile of 16 may read past the last.
struct Activations {
  ActivationKind kind;
  int64_t num_rows;
  int64_t num_columns;
  int64_t row_stride;  // of `levels`, in bytes
  uint8_t* levels;
  float* scales;       // [num_rows], or a float for each row and group, at group_index
  float* scaled_sums;  // at group_index: scale × sum of the levels
  int32_t* origins;    // at group_index: kSumOrigin less what a weight's zero point of 128 adds, 128 × sum of the levels
};

enum class Prologue : int32_t {
  kPlain,    // values are [rows][columns]
  kRmsNorm,  // the same, normalized and multiplied by norm_weight
  kSiluMul,  // values are [rows][2 × columns]: silu(first half) × second half
};

struct Source {
  Prologue prologue;
  const float* values;
  int64_t row_stride;  // in floats
  const float* norm_weight;
  float eps;
};

// Where a group's numbers are: those of 16 rows lie side by side, [rows / 16][groups][16].
constexpr int64_t kSideRows = 16;

int64_t activation_bytes(ActivationKind kind, int64_t num_rows, int64_t num_columns);

// `memory` has activation_bytes(…) bytes; `num_columns` is a multiple of 32.
Activations activations_over(void* memory, ActivationKind kind, int64_t num_rows, int64_t num_columns);

// Fills all of `activations`. A row's bytes depend on that row of the source alone.
void quantize(const Source& source, const Activations& activations);

}  // namespace baton
