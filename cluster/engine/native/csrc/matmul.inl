// Included inside an instruction set's namespace, after its lanes. One template for each format: `multiply` gives a tile of
// kRows × kVectors vectors of sums. An element's operations and their order are the same in every tile, so a row's bits are too.

// A vector of a panel is 64 bytes; the two of a panel alternate.
constexpr int64_t kVectorBytes = 64;
constexpr int64_t kStepBytes = 2 * kVectorBytes;
constexpr int64_t kPrefetchBytes = 2048;
// With fewer rows memory is the limit, and its own prefetcher does better alone.
constexpr int kPrefetchRows = 4;

template <int kRows, int kVectors>
struct Tile {
  Floats sums[kRows][kVectors];
};

template <int kRows, int kVectors>
struct IntTile {
  Ints sums[kRows][kVectors];
};

template <int kRows, int kVectors>
BATON_INLINE void prefetch_step(const uint8_t* weights) {
  if (kRows < kPrefetchRows) return;
  for (int v = 0; v < kVectors; ++v) prefetch(weights + kPrefetchBytes + v * kVectorBytes);
}

// A panel: [k / 4][2][16 columns][4], then 32 scales, then 32 corrections: 128 × the sum of a channel's weights.
struct W8A8 {
  template <int kRows, int kVectors>
  static BATON_INLINE void multiply(const uint8_t* panel, int vector, const Activations& x, int64_t row, Tile<kRows, kVectors>& tile) {
    const int64_t num_steps = (x.num_columns + 63) / 64 * 16;
    const uint8_t* weights = panel + vector * kVectorBytes;
    const uint8_t* levels = x.levels + row * x.row_stride;
    const int64_t stride = x.row_stride;
    Ints sums[kRows][kVectors];
    for (int m = 0; m < kRows; ++m) {
      for (int v = 0; v < kVectors; ++v) sums[m][v] = broadcast_int(0);
    }
#pragma GCC unroll 4
    for (int64_t step = 0; step < num_steps; ++step) {
      prefetch_step<kRows, kVectors>(weights);
      Signed channel[kVectors];
      for (int v = 0; v < kVectors; ++v) channel[v] = load_signed(weights + v * kVectorBytes);
      for (int m = 0; m < kRows; ++m) {
        const Unsigned level = broadcast_unsigned(levels + m * stride);
        for (int v = 0; v < kVectors; ++v) sums[m][v] = dot(sums[m][v], level, channel[v]);
      }
      weights += kStepBytes;
      levels += 4;
    }
    scale_sums<kRows, kVectors>(sums, panel + num_steps * kStepBytes, vector, x.scales + row, tile);
  }

  template <int kRows, int kVectors>
  static BATON_INLINE void scale_sums(const Ints (&sums)[kRows][kVectors], const uint8_t* tail, int vector, const float* row_scales,
                                      Tile<kRows, kVectors>& tile) {
    for (int v = 0; v < kVectors; ++v) {
      const Floats scales = load(reinterpret_cast<const float*>(tail + (vector + v) * kVectorBytes));
      const Ints corrections = load_ints(tail + (vector + v + 2) * kVectorBytes);
      for (int m = 0; m < kRows; ++m) {
        tile.sums[m][v] = mul(mul(to_floats(sub(sums[m][v], corrections)), scales), broadcast(row_scales[m]));
      }
    }
  }
};

// A panel, for each group: [8][2][16 columns][4] levels with zero point 128, then 32 float16 scales.
struct W8G32 {
  template <int kRows, int kVectors>
  static BATON_INLINE void multiply(const uint8_t* panel, int vector, const Activations& x, int64_t row, Tile<kRows, kVectors>& tile) {
    constexpr int kSteps = 8;
    const int64_t num_groups = x.num_columns / kGroupSize;
    const uint8_t* weights = panel + vector * kVectorBytes;
    const uint8_t* scales = panel + kSteps * kStepBytes + vector * 32;
    const uint8_t* levels = x.levels + row * x.row_stride;
    const int64_t at = row * num_groups;
    for (int m = 0; m < kRows; ++m) {
      for (int v = 0; v < kVectors; ++v) tile.sums[m][v] = broadcast(0.0f);
    }
    for (int64_t group = 0; group < num_groups; ++group) {
      IntTile<kRows, kVectors> dots;
      for (int m = 0; m < kRows; ++m) {
        for (int v = 0; v < kVectors; ++v) dots.sums[m][v] = broadcast_int(x.offsets[at + m * num_groups + group]);
      }
#pragma GCC unroll 8
      for (int step = 0; step < kSteps; ++step) {
        prefetch_step<kRows, kVectors>(weights);
        Unsigned channel[kVectors];
        for (int v = 0; v < kVectors; ++v) channel[v] = load_unsigned(weights + step * kStepBytes + v * kVectorBytes);
        for (int m = 0; m < kRows; ++m) {
          const Signed level = broadcast_signed(levels + m * x.row_stride + 4 * step);
          for (int v = 0; v < kVectors; ++v) dots.sums[m][v] = dot(dots.sums[m][v], channel[v], level);
        }
      }
      for (int v = 0; v < kVectors; ++v) {
        const Floats scale = load_halves(scales + v * 32);
        for (int m = 0; m < kRows; ++m) {
          const Floats row_scale = broadcast(x.scales[at + m * num_groups + group]);
          tile.sums[m][v] = fma(mul(to_floats(dots.sums[m][v]), scale), row_scale, tile.sums[m][v]);
        }
      }
      weights += kSteps * kStepBytes + 64;
      scales += kSteps * kStepBytes + 64;
      levels += kGroupSize;
    }
  }
};

// A panel, for each group: [4][2][16 columns][4] bytes with k in the low and k + 16 in the high nibble, then 32 float16 scales, then
// 32 float16 minima.
struct W4A8 {
  template <int kRows, int kVectors>
  static BATON_INLINE void multiply(const uint8_t* panel, int vector, const Activations& x, int64_t row, Tile<kRows, kVectors>& tile) {
    constexpr int kSteps = 4;
    constexpr int64_t kGroupBytes = kSteps * kStepBytes + 128;
    const int64_t num_groups = x.num_columns / kGroupSize;
    const uint8_t* weights = panel + vector * kVectorBytes;
    const uint8_t* scales = panel + kSteps * kStepBytes + vector * 32;
    const uint8_t* levels = x.levels + row * x.row_stride;
    const int64_t at = row * num_groups;
    for (int m = 0; m < kRows; ++m) {
      for (int v = 0; v < kVectors; ++v) tile.sums[m][v] = broadcast(0.0f);
    }
    for (int64_t group = 0; group < num_groups; ++group) {
      IntTile<kRows, kVectors> dots;
      for (int m = 0; m < kRows; ++m) {
        for (int v = 0; v < kVectors; ++v) dots.sums[m][v] = broadcast_int(0);
      }
      if (kRows >= kPrefetchRows) {
        for (int line = 0; line < 5 * kVectors; ++line) prefetch(weights + 4 * kGroupBytes + line * 64);
      }
#pragma GCC unroll 4
      for (int step = 0; step < kSteps; ++step) {
        Unsigned low[kVectors];
        Unsigned high[kVectors];
        for (int v = 0; v < kVectors; ++v) {
          low[v] = low_nibbles(weights + step * kStepBytes + v * kVectorBytes);
          high[v] = high_nibbles(weights + step * kStepBytes + v * kVectorBytes);
        }
        for (int m = 0; m < kRows; ++m) {
          const Signed first = broadcast_signed(levels + m * x.row_stride + 4 * step);
          const Signed second = broadcast_signed(levels + m * x.row_stride + 4 * step + 16);
          for (int v = 0; v < kVectors; ++v) dots.sums[m][v] = dot(dot(dots.sums[m][v], low[v], first), high[v], second);
        }
      }
      for (int v = 0; v < kVectors; ++v) {
        const Floats scale = load_halves(scales + v * 32);
        const Floats minimum = load_halves(scales + 64 + v * 32);
        for (int m = 0; m < kRows; ++m) {
          const int64_t element = at + m * num_groups + group;
          const Floats sum = fma(mul(to_floats(dots.sums[m][v]), scale), broadcast(x.scales[element]), tile.sums[m][v]);
          tile.sums[m][v] = fma(minimum, broadcast(x.scaled_sums[element]), sum);
        }
      }
      weights += kGroupBytes;
      scales += kGroupBytes;
      levels += kGroupSize;
    }
  }
};

// A panel: [k / 2][2][16 columns][2]. One sum an element, along k.
struct Bf16 {
  template <int kRows, int kVectors>
  static BATON_INLINE void multiply(const uint8_t* panel, int vector, const Activations& x, int64_t row, Tile<kRows, kVectors>& tile) {
    const uint8_t* weights = panel + vector * kVectorBytes;
    const uint8_t* values = x.levels + row * x.row_stride;
    const int64_t stride = x.row_stride;
    Floats sums[kRows][kVectors];
    for (int m = 0; m < kRows; ++m) {
      for (int v = 0; v < kVectors; ++v) sums[m][v] = broadcast(0.0f);
    }
#pragma GCC unroll 4
    for (int64_t step = 0; step < x.num_columns / 2; ++step) {
      prefetch_step<kRows, kVectors>(weights);
      Pairs channel[kVectors];
      for (int v = 0; v < kVectors; ++v) channel[v] = load_pairs(weights + v * kVectorBytes);
      for (int m = 0; m < kRows; ++m) {
        const Pairs value = broadcast_pairs(values + m * stride);
        for (int v = 0; v < kVectors; ++v) sums[m][v] = dot(sums[m][v], channel[v], value);
      }
      weights += kStepBytes;
      values += 4;
    }
    for (int m = 0; m < kRows; ++m) {
      for (int v = 0; v < kVectors; ++v) tile.sums[m][v] = sums[m][v];
    }
  }
};

// Bias, what was there before, and the columns that exist.
BATON_INLINE void store_vector(Floats values, int64_t row, int64_t column, const Weight& weight, const Output& output) {
  if (column >= weight.num_outputs) return;
  const int64_t rest = weight.num_outputs - column;
  const int count = rest < 16 ? static_cast<int>(rest) : 16;
  float* out = output.values + row * output.row_stride + column;
  if (count == 16) {
    if (weight.bias) values = add(values, load(weight.bias + column));
    store(out, output.accumulate ? add(load(out), values) : values);
  } else {
    if (weight.bias) values = add(values, load(weight.bias + column, count));
    store(out, output.accumulate ? add(load(out, count), values) : values, count);
  }
}

template <class Format, int kRows>
void multiply_tile(const uint8_t* panel, int64_t column, int64_t row, const Weight& weight, const Activations& x, const Output& output) {
  for (int vector = 0; vector < 2; vector += kTileVectors) {
    Tile<kRows, kTileVectors> tile;
    Format::template multiply<kRows, kTileVectors>(panel, vector, x, row, tile);
    for (int m = 0; m < kRows; ++m) {
      for (int v = 0; v < kTileVectors; ++v) store_vector(tile.sums[m][v], row + m, column + 16 * (vector + v), weight, output);
    }
  }
}

using TileFunction = void (*)(const uint8_t*, int64_t, int64_t, const Weight&, const Activations&, const Output&);

template <class Format, int... kRows>
constexpr auto tile_functions(std::integer_sequence<int, kRows...>) {
  return std::array<TileFunction, sizeof...(kRows)>{&multiply_tile<Format, kRows + 1>...};
}

// Rows first_row … last_row - 1 of one panel, in tiles as tall as they can be.
template <class Format>
void multiply_rows(const uint8_t* panel, int64_t column, int64_t first_row, const Weight& weight, const Activations& x,
                   const Output& output) {
  static constexpr auto kFunctions = tile_functions<Format>(std::make_integer_sequence<int, kTileRows>());
  for (int64_t row = first_row; row < x.num_rows; row += kTileRows) {
    const int64_t rest = x.num_rows - row;
    const int64_t count = rest < kTileRows ? rest : kTileRows;
    kFunctions[count - 1](panel, column, row, weight, x, output);
  }
}

template <class Format>
void multiply_format(const Weight& weight, const Activations& x, const Output& output, int64_t first_panel, int64_t last_panel,
                     int64_t bytes) {
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    multiply_rows<Format>(weight.panels + panel * bytes, panel * kPanelColumns, 0, weight, x, output);
  }
}

void multiply_panels(const Weight& weight, const Activations& x, const Output& output, int64_t first_panel, int64_t last_panel) {
  const int64_t bytes = panel_bytes(weight.format, weight.num_inputs);
  switch (weight.format) {
    case WeightFormat::kW8A8: return multiply_format<W8A8>(weight, x, output, first_panel, last_panel, bytes);
    case WeightFormat::kW8G32: return multiply_format<W8G32>(weight, x, output, first_panel, last_panel, bytes);
    case WeightFormat::kW4A8: return multiply_format<W4A8>(weight, x, output, first_panel, last_panel, bytes);
    case WeightFormat::kBf16: return multiply_format<Bf16>(weight, x, output, first_panel, last_panel, bytes);
  }
}
