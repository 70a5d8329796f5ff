// Included inside an instruction set's namespace, after its lanes. A row has whole groups of 32, so no loop here has a tail.

// Two sums of 16 lanes each, then a fixed tree.
BATON_INLINE float sum_of_squares(const float* values, int64_t count) {
  Floats even = broadcast(0.0f);
  Floats odd = broadcast(0.0f);
  for (int64_t k = 0; k < count; k += 32) {
    const Floats first = load(values + k);
    const Floats second = load(values + k + 16);
    even = fma(first, first, even);
    odd = fma(second, second, odd);
  }
  return tree_sum(add(even, odd));
}

BATON_INLINE void rms_norm_row(const float* values, const float* weight, float eps, int64_t count, float* out) {
  const float mean = sum_of_squares(values, count) / static_cast<float>(count);
  const Floats scale = broadcast(1.0f / __builtin_sqrtf(mean + eps));
  for (int64_t k = 0; k < count; k += 16) store(out + k, mul(mul(load(values + k), scale), load(weight + k)));
}

// e to the power of x, within 2 units in the last place; what would leave the normal floats is held at their ends.
BATON_INLINE Floats exponential(Floats x) {
  const Floats held = lesser(broadcast(88.3762589f), greater(broadcast(-87.3365448f), x));
  const Ints exponents = round_to_ints(mul(held, broadcast(1.44269504f)));
  const Floats power = to_floats(exponents);
  // ln 2 in two parts, the first with few enough bits for the product to be exact.
  const Floats rest = fma(power, broadcast(2.12194440e-4f), fma(power, broadcast(-0.693359375f), held));
  Floats series = broadcast(1.9875691500e-4f);
  series = fma(series, rest, broadcast(1.3981999507e-3f));
  series = fma(series, rest, broadcast(8.3334519073e-3f));
  series = fma(series, rest, broadcast(4.1665795894e-2f));
  series = fma(series, rest, broadcast(1.6666665459e-1f));
  series = fma(series, rest, broadcast(5.0000001201e-1f));
  series = fma(mul(rest, rest), series, add(rest, broadcast(1.0f)));
  return mul(series, power_of_two(exponents));
}

BATON_INLINE void silu_mul_row(const float* gates, int64_t count, float* out) {
  const float* ups = gates + count;
  for (int64_t k = 0; k < count; k += 16) {
    const Floats gate = load(gates + k);
    const Floats denominator = add(exponential(sub(broadcast(0.0f), gate)), broadcast(1.0f));
    store(out + k, mul(div(gate, denominator), load(ups + k)));
  }
}

// The greatest magnitude / 127. Compared as integers, where a NaN is greater than all numbers: it makes the scale, and so the row, a NaN.
struct Scale {
  float scale, inverse;
};
BATON_INLINE Scale scale_for(Ints magnitudes) {
  constexpr int32_t kLeastBits = 0x0da24260;  // 1e-30, so that the inverse is finite
  const int32_t held = greatest(greater_int(magnitudes, broadcast_int(kLeastBits)));
  float greatest_magnitude;
  __builtin_memcpy(&greatest_magnitude, &held, sizeof(held));
  return {greatest_magnitude / 127.0f, 127.0f / greatest_magnitude};
}

BATON_INLINE void quantize_token(const float* values, const Activations& to, int64_t row) {
  Ints magnitudes = broadcast_int(0);
  for (int64_t k = 0; k < to.num_columns; k += 16) magnitudes = greater_int(magnitudes, magnitude_bits(load(values + k)));
  const Scale scale = scale_for(magnitudes);
  uint8_t* levels = to.levels + row * to.row_stride;
  for (int64_t k = 0; k < to.num_columns; k += 16) {
    const Ints level = round_to_ints(mul(load(values + k), broadcast(scale.inverse)));
    store_bytes(levels + k, kSumsHoldZeroPoint ? add(level, broadcast_int(128)) : level);
  }
  // Weights are filled up to 64 with zeros; the bytes they meet may be any.
  if (to.num_columns % 64) __builtin_memset(levels + to.num_columns, 128, 32);
  to.scales[row] = scale.scale;
}

BATON_INLINE int64_t group_index(int64_t row, int64_t group, int64_t num_groups) {
  return (row / kSideRows * num_groups + group) * kSideRows + row % kSideRows;
}

BATON_INLINE void quantize_groups(const float* values, const Activations& to, int64_t row) {
  const int64_t num_groups = to.num_columns / kGroupSize;
  uint8_t* levels = to.levels + row * to.row_stride;
  for (int64_t group = 0; group < num_groups; ++group) {
    const Floats first = load(values + group * kGroupSize);
    const Floats second = load(values + group * kGroupSize + 16);
    const Scale scale = scale_for(greater_int(magnitude_bits(first), magnitude_bits(second)));
    const Ints first_levels = round_to_ints(mul(first, broadcast(scale.inverse)));
    const Ints second_levels = round_to_ints(mul(second, broadcast(scale.inverse)));
    store_bytes(levels + group * kGroupSize, first_levels);
    store_bytes(levels + group * kGroupSize + 16, second_levels);
    const int32_t level_sum = sum(add(first_levels, second_levels));
    const int64_t at = group_index(row, group, num_groups);
    to.scales[at] = scale.scale;
    to.scaled_sums[at] = scale.scale * static_cast<float>(level_sum);
    to.origins[at] = static_cast<int32_t>(kSumOrigin - 128u * static_cast<uint32_t>(level_sum));
  }
}

BATON_INLINE void round_to_bf16(const float* values, const Activations& to, int64_t row) {
  uint8_t* out = to.levels + row * to.row_stride;
  for (int64_t k = 0; k < to.num_columns; k += 16) store_bf16(out + 2 * k, load(values + k));
}

BATON_INLINE const float* source_row(const Source& source, int64_t row, int64_t count, float* scratch) {
  const float* values = source.values + row * source.row_stride;
  if (source.prologue == Prologue::kPlain) return values;
  if (source.prologue == Prologue::kRmsNorm) {
    rms_norm_row(values, source.norm_weight, source.eps, count, scratch);
  } else {
    silu_mul_row(values, count, scratch);
  }
  return scratch;
}

void quantize_rows(const Source& source, const Activations& to, int64_t first_row, int64_t last_row, float* scratch) {
  for (int64_t row = first_row; row < last_row; ++row) {
    const float* values = source_row(source, row, to.num_columns, scratch);
    if (to.kind == ActivationKind::kTokenInt8) {
      quantize_token(values, to, row);
    } else if (to.kind == ActivationKind::kGroupInt8) {
      quantize_groups(values, to, row);
    } else {
      round_to_bf16(values, to, row);
    }
  }
}
