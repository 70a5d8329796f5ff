// Included after `tiles.inl`: a whole matrix in tiles, blocks that stay in the caches, and what is done with the sums.

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
  constexpr int kVectors = tile_vectors(kRows);
  for (int vector = 0; vector < 2; vector += kVectors) {
    Tile<kRows, kVectors> tile;
    Format::template multiply<kRows, kVectors>(panel, vector, x, row, tile);
    for (int m = 0; m < kRows; ++m) {
      for (int v = 0; v < kVectors; ++v) store_vector(tile.sums[m][v], row + m, column + 16 * (vector + v), weight, output);
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
void multiply_rows(const uint8_t* panel, int64_t column, int64_t first_row, int64_t last_row, const Weight& weight, const Activations& x,
                   const Output& output) {
  static constexpr auto kFunctions = tile_functions<Format>(std::make_integer_sequence<int, kTileRows>());
  for (int64_t row = first_row; row < last_row; row += kTileRows) {
    const int64_t rest = last_row - row;
    const int64_t count = rest < kTileRows ? rest : kTileRows;
    kFunctions[count - 1](panel, column, row, weight, x, output);
  }
}

constexpr int64_t kBlockRows = 64;

// Calls fn(panel, first_row, last_row) for all panels and blocks of rows. Neighbouring panels follow each other within a block, so that
// they, and what they write, are still in the caches; prepare(first, last) comes before the panels of a run.
template <class Prepare, class Fn>
BATON_INLINE void for_blocks(int64_t num_rows, int64_t first_panel, int64_t last_panel, Prepare&& prepare, Fn&& fn) {
  for (int64_t first = first_panel; first < last_panel; first += kBlockPanels) {
    const int64_t last = last_panel - first < kBlockPanels ? last_panel : first + kBlockPanels;
    prepare(first, last);
    for (int64_t row = 0; row < num_rows; row += kBlockRows) {
      const int64_t last_row = num_rows - row < kBlockRows ? num_rows : row + kBlockRows;
      for (int64_t panel = first; panel < last; ++panel) fn(panel, row, last_row);
    }
  }
}

template <class Format>
void multiply_format(const Weight& weight, const Activations& x, const Output& output, int64_t first_panel, int64_t last_panel) {
  const int64_t bytes = panel_bytes(weight.format, weight.num_inputs);
  const auto nothing = [](int64_t, int64_t) {};
  for_blocks(x.num_rows, first_panel, last_panel, nothing, [&](int64_t panel, int64_t first_row, int64_t last_row) {
    multiply_rows<Format>(weight.panels + panel * bytes, panel * kPanelColumns, first_row, last_row, weight, x, output);
  });
}

// A group of W4A8 as one of ByteGroups.
BATON_INLINE void unpack_group(const uint8_t* group, uint8_t* out) {
  constexpr int64_t kHalfBytes = 4 * kStepBytes;
  for (int64_t i = 0; i < kHalfBytes; ++i) {
    out[i] = group[i] & 15;
    out[kHalfBytes + i] = group[i] >> 4;
  }
  __builtin_memcpy(out + 2 * kHalfBytes, group + kHalfBytes, 128);
}

// With more than a block of rows it is cheaper to take nibbles apart once than in every tile; with fewer the tiles hide the weights' way
// from memory, which this does not. The bits are the same.
constexpr int64_t kUnpackRows = kBlockRows + 1;

void multiply_unpacked(const Weight& weight, const Activations& x, const Output& output, int64_t first_panel, int64_t last_panel,
                       uint8_t* scratch) {
  using Unpacked = ByteGroups<NibbleBytes>;
  const int64_t num_groups = x.num_columns / kGroupSize;
  const int64_t bytes = panel_bytes(weight.format, weight.num_inputs);
  int64_t first_unpacked = 0;
  const auto unpack = [&](int64_t first, int64_t last) {
    first_unpacked = first;
    for (int64_t i = 0; i < (last - first) * num_groups; ++i) {
      unpack_group(weight.panels + first * bytes + i * (bytes / num_groups), scratch + i * Unpacked::kGroupBytes);
    }
  };
  for_blocks(x.num_rows, first_panel, last_panel, unpack, [&](int64_t panel, int64_t first_row, int64_t last_row) {
    const uint8_t* unpacked = scratch + (panel - first_unpacked) * num_groups * Unpacked::kGroupBytes;
    multiply_rows<Unpacked>(unpacked, panel * kPanelColumns, first_row, last_row, weight, x, output);
  });
}

void multiply_panels(const Weight& weight, const Activations& x, const Output& output, int64_t first_panel, int64_t last_panel,
                     uint8_t* scratch) {
  if (weight.format == WeightFormat::kW4A8 && x.num_rows >= kUnpackRows) {
    return multiply_unpacked(weight, x, output, first_panel, last_panel, scratch);
  }
  switch (weight.format) {
    case WeightFormat::kW8A8: return multiply_format<W8A8>(weight, x, output, first_panel, last_panel);
    case WeightFormat::kW8G32: return multiply_format<ByteGroups<CenteredBytes>>(weight, x, output, first_panel, last_panel);
    case WeightFormat::kW4A8: return multiply_format<W4A8>(weight, x, output, first_panel, last_panel);
    case WeightFormat::kBf16: return multiply_format<Bf16>(weight, x, output, first_panel, last_panel);
  }
}
