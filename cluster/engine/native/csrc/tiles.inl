// Included inside an instruction set's namespace, after its lanes. One template for each format: `multiply` gives a tile of
// kRows × kVectors vectors of sums. An element's operations and their order are the same in every tile, so a row's bits are too.

// A vector of a panel is 64 bytes; the two of a panel alternate.
constexpr int64_t kVectorBytes = 64;
constexpr int64_t kStepBytes = 2 * kVectorBytes;
// With fewer rows memory is the limit, and its own prefetcher does better alone.
constexpr int kPrefetchRows = 4;

template <int kRows, int kVectors>
struct Tile {
  Floats sums[kRows][kVectors];
};

template <int kRows, int kVectors>
BATON_INLINE void prefetch_step(const uint8_t* weights) {
  if (kRows < kPrefetchRows) return;
  for (int v = 0; v < kVectors; ++v) prefetch(weights + kPrefetchBytes + v * kVectorBytes);
}

// The numbers of the first of a tile's rows, whose others follow, in its first group; the next group's are kSideRows further.
BATON_INLINE int64_t first_group(int64_t row, int64_t num_groups) { return row / kSideRows * kSideRows * num_groups + row % kSideRows; }

// A sum over a group as a float, times the group's scale: rounded once, as if the sum had been converted and then multiplied.
struct GroupScale {
  Floats scale, from_origin;
};
BATON_INLINE GroupScale group_scale(const uint8_t* halves) {
  const Floats scale = load_halves(halves);
  return {scale, mul(scale, broadcast(-0x1.8p23f))};  // exact: 11 bits times 2
}
BATON_INLINE Floats scaled(Ints sum, const GroupScale& by) { return fma(as_floats(sum), by.scale, by.from_origin); }

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
      SignedChannels channels[kVectors];
      for (int v = 0; v < kVectors; ++v) channels[v] = load_signed(weights + v * kVectorBytes);
      for (int m = 0; m < kRows; ++m) {
        const TokenLevel level = broadcast_token(levels + m * stride);
        for (int v = 0; v < kVectors; ++v) sums[m][v] = dot(sums[m][v], level, channels[v]);
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
        const Ints sum = kSumsHoldZeroPoint ? sub(sums[m][v], corrections) : sums[m][v];
        tile.sums[m][v] = mul(mul(to_floats(sum), scales), broadcast(row_scales[m]));
      }
    }
  }
};

// How the bytes of a group are multiplied: as weights with a zero point of 128 …
struct CenteredBytes {
  using Channels = UnsignedChannels;
  using Sums = Ints;
  static BATON_INLINE Channels load(const uint8_t* bytes) { return load_unsigned(bytes); }
  static BATON_INLINE Sums start(const Activations& x, int64_t at) { return broadcast_int(kSumsHoldZeroPoint ? x.origins[at] : kSumOrigin); }
  static BATON_INLINE Ints end(Sums sums) { return sums; }
};
// … or as nibbles, which have been unpacked.
struct NibbleBytes {
  using Channels = Nibbles;
  using Sums = NibbleSums;
  static BATON_INLINE Channels load(const uint8_t* bytes) { return load_nibbles(bytes); }
  static BATON_INLINE Sums start(const Activations&, int64_t) { return no_nibble_sums(kSumOrigin); }
  static BATON_INLINE Ints end(Sums sums) { return total(sums, kSumOrigin); }
};

// A panel, for each group: [8][2][16 columns][4] bytes, then 32 float16 scales, then with nibbles 32 float16 minima.
template <class Bytes>
struct ByteGroups {
  static constexpr bool kHasMinima = std::is_same_v<Bytes, NibbleBytes>;
  static constexpr int64_t kGroupBytes = 8 * kStepBytes + (kHasMinima ? 128 : 64);

  template <int kRows, int kVectors>
  static BATON_INLINE void multiply(const uint8_t* panel, int vector, const Activations& x, int64_t row, Tile<kRows, kVectors>& tile) {
    constexpr int kSteps = 8;
    const int64_t num_groups = x.num_columns / kGroupSize;
    const uint8_t* weights = panel + vector * kVectorBytes;
    const uint8_t* scales = panel + kSteps * kStepBytes + vector * 32;
    const uint8_t* levels = x.levels + row * x.row_stride;
    int64_t at = first_group(row, num_groups);
    for (int m = 0; m < kRows; ++m) {
      for (int v = 0; v < kVectors; ++v) tile.sums[m][v] = broadcast(0.0f);
    }
    for (int64_t group = 0; group < num_groups; ++group) {
      typename Bytes::Sums dots[kRows][kVectors];
      for (int m = 0; m < kRows; ++m) {
        for (int v = 0; v < kVectors; ++v) dots[m][v] = Bytes::start(x, at + m);
      }
#pragma GCC unroll 8
      for (int step = 0; step < kSteps; ++step) {
        prefetch_step<kRows, kVectors>(weights + step * kStepBytes);
        typename Bytes::Channels channels[kVectors];
        for (int v = 0; v < kVectors; ++v) channels[v] = Bytes::load(weights + step * kStepBytes + v * kVectorBytes);
        for (int m = 0; m < kRows; ++m) {
          const GroupLevel level = broadcast_group(levels + m * x.row_stride + 4 * step);
          for (int v = 0; v < kVectors; ++v) dots[m][v] = dot(dots[m][v], channels[v], level);
        }
      }
      for (int v = 0; v < kVectors; ++v) {
        const GroupScale scale = group_scale(scales + v * 32);
        const Floats minimum = kHasMinima ? load_halves(scales + 64 + v * 32) : broadcast(0.0f);
        for (int m = 0; m < kRows; ++m) {
          tile.sums[m][v] = fma(scaled(Bytes::end(dots[m][v]), scale), broadcast(x.scales[at + m]), tile.sums[m][v]);
          if (kHasMinima) tile.sums[m][v] = fma(minimum, broadcast(x.scaled_sums[at + m]), tile.sums[m][v]);
        }
      }
      weights += kGroupBytes;
      scales += kGroupBytes;
      levels += kGroupSize;
      at += kSideRows;
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
    int64_t at = first_group(row, num_groups);
    for (int m = 0; m < kRows; ++m) {
      for (int v = 0; v < kVectors; ++v) tile.sums[m][v] = broadcast(0.0f);
    }
    for (int64_t group = 0; group < num_groups; ++group) {
      NibbleSums dots[kRows][kVectors];
      for (int m = 0; m < kRows; ++m) {
        for (int v = 0; v < kVectors; ++v) dots[m][v] = no_nibble_sums(kSumOrigin);
      }
      // For one row too: there is so much to do with each vector that the loads alone do not run far enough ahead.
      for (int step = 0; step <= kSteps; ++step) {
        for (int v = 0; v < kVectors; ++v) prefetch(weights + kGroupsAhead * kGroupBytes + step * kStepBytes + v * kVectorBytes);
      }
#pragma GCC unroll 4
      for (int step = 0; step < kSteps; ++step) {
        Nibbles low[kVectors];
        Nibbles high[kVectors];
        for (int v = 0; v < kVectors; ++v) {
          low[v] = low_nibbles(weights + step * kStepBytes + v * kVectorBytes);
          high[v] = high_nibbles(weights + step * kStepBytes + v * kVectorBytes);
        }
        for (int m = 0; m < kRows; ++m) {
          const GroupLevel level = broadcast_group(levels + m * x.row_stride + 4 * step);
          for (int v = 0; v < kVectors; ++v) dots[m][v] = dot(dots[m][v], low[v], level);
        }
        for (int m = 0; m < kRows; ++m) {
          const GroupLevel level = broadcast_group(levels + m * x.row_stride + 4 * step + 16);
          for (int v = 0; v < kVectors; ++v) dots[m][v] = dot(dots[m][v], high[v], level);
        }
      }
      for (int v = 0; v < kVectors; ++v) {
        const GroupScale scale = group_scale(scales + v * 32);
        const Floats minimum = load_halves(scales + 64 + v * 32);
        for (int m = 0; m < kRows; ++m) {
          const Floats sum = fma(scaled(total(dots[m][v], kSumOrigin), scale), broadcast(x.scales[at + m]), tile.sums[m][v]);
          tile.sums[m][v] = fma(minimum, broadcast(x.scaled_sums[at + m]), sum);
        }
      }
      weights += kGroupBytes;
      scales += kGroupBytes;
      levels += kGroupSize;
      at += kSideRows;
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
