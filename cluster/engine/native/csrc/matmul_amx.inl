// Included after `matmul.inl` with AVX-512's lanes. The tile registers multiply 16 rows at once. Integer sums are exact and all that
// follows is `matmul.inl`'s, so W8A8 gives the same bits as there, and the number of rows may choose. The tiles sum bfloat16 products in
// another order, so BF16 always goes through them. Groups of 32 stay with AVX-512: a group's sums would have to leave the tile registers
// through memory, which takes as long as computing them without tiles.

constexpr int kTile = 16;  // rows of a tile, and its columns of 32 bits
constexpr int64_t kTileBytes = kTile * kStepBytes;  // of a panel: one step along k for both vectors
constexpr int64_t kStepsAhead = 2;

// Tiles 0…3 are sums, 4 and 5 rows of activations, 6 and 7 weights. Held by one thread while it multiplies.
class TileRegisters {
 public:
  // `rows` of activations and sums; `depth` is 4-byte steps along k, of activations and weights.
  TileRegisters(int64_t rows, int depth) {
    Config config;
    for (int tile = 0; tile < 8; ++tile) {
      config.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : depth);
      config.row_bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? 4 * depth : 64);
    }
    publish(&config);
    _tile_loadconfig(&config);
  }
  ~TileRegisters() { _tile_release(); }

  // Tells the compiler that tile instructions read what was written; their intrinsics do not.
  static void publish(const void* memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

 private:
  struct alignas(64) Config {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };
};

struct alignas(64) TileSums {
  uint8_t bytes[2][2][kTile][64];  // row tile, vector, row
};

struct ByteTiles {
  static BATON_INLINE void multiply_first() { _tile_dpbusd(0, 4, 6); _tile_dpbusd(1, 4, 7); }
  static BATON_INLINE void multiply_second() { _tile_dpbusd(2, 5, 6); _tile_dpbusd(3, 5, 7); }
};

struct Bf16Tiles {
  static BATON_INLINE void multiply_first() { _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); }
  static BATON_INLINE void multiply_second() { _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7); }
};

// Sums of kRowTiles × 16 rows and the 32 columns of a panel. The first rows to meet it bring the panel into the cache.
template <class Product, int kRowTiles, bool kIsFirst>
void multiply_tiles(const uint8_t* panel, int64_t num_steps, const Activations& x, int64_t row, TileSums& sums) {
  const uint8_t* first = x.levels + row * x.row_stride;
  const uint8_t* second = first + kTile * x.row_stride;
  _tile_zero(0);
  _tile_zero(1);
  if (kRowTiles == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < num_steps; ++step) {
    if (kIsFirst) {
      for (int64_t line = 0; line < kTileBytes; line += 64) prefetch(panel + (step + kStepsAhead) * kTileBytes + line);
    }
    _tile_loadd(6, panel + step * kTileBytes, kStepBytes);
    _tile_loadd(7, panel + step * kTileBytes + kVectorBytes, kStepBytes);
    _tile_loadd(4, first + step * 64, x.row_stride);
    Product::multiply_first();
    if (kRowTiles == 2) {
      _tile_loadd(5, second + step * 64, x.row_stride);
      Product::multiply_second();
    }
  }
  _tile_stored(0, sums.bytes[0][0], 64);
  _tile_stored(1, sums.bytes[0][1], 64);
  if (kRowTiles == 2) {
    _tile_stored(2, sums.bytes[1][0], 64);
    _tile_stored(3, sums.bytes[1][1], 64);
  }
}

struct FinishW8A8 {
  static BATON_INLINE void row(const TileSums& sums, int m, const uint8_t* tail, const Activations& x, int64_t row, Tile<1, 2>& result) {
    const Ints loaded[1][2] = {{load_ints(sums.bytes[m / kTile][0][m % kTile]), load_ints(sums.bytes[m / kTile][1][m % kTile])}};
    W8A8::scale_sums<1, 2>(loaded, tail, 0, x.scales + row, result);
  }
};

struct FinishBf16 {
  static BATON_INLINE void row(const TileSums& sums, int m, const uint8_t*, const Activations&, int64_t, Tile<1, 2>& result) {
    for (int v = 0; v < 2; ++v) result.sums[0][v] = load(reinterpret_cast<const float*>(sums.bytes[m / kTile][v][m % kTile]));
  }
};

template <class Product, class Finish>
void multiply_panel(const uint8_t* panel, int64_t column, int64_t num_steps, int64_t first_row, int64_t last_row, const Weight& weight,
                    const Activations& x, const Output& output) {
  TileSums sums;
  for (int64_t row = first_row; row < last_row; row += 2 * kTile) {
    const int64_t rest = last_row - row;
    const auto multiply = rest > kTile ? (row == 0 ? &multiply_tiles<Product, 2, true> : &multiply_tiles<Product, 2, false>)
                                       : (row == 0 ? &multiply_tiles<Product, 1, true> : &multiply_tiles<Product, 1, false>);
    multiply(panel, num_steps, x, row, sums);
    const int count = static_cast<int>(rest < 2 * kTile ? rest : 2 * kTile);
    for (int m = 0; m < count; ++m) {
      Tile<1, 2> result;
      Finish::row(sums, m, panel + num_steps * kTileBytes, x, row + m, result);
      for (int v = 0; v < 2; ++v) store_vector(result.sums[0][v], row + m, column + 16 * v, weight, output);
    }
  }
}

template <class Product, class Finish>
void multiply_panels_in_tiles(const Weight& weight, const Activations& x, const Output& output, int64_t first_panel, int64_t last_panel,
                              int64_t num_steps) {
  const int64_t bytes = panel_bytes(weight.format, weight.num_inputs);
  const TileRegisters registers(x.num_rows < kTile ? x.num_rows : kTile, kTile);
  const auto nothing = [](int64_t, int64_t) {};
  for_blocks(x.num_rows, first_panel, last_panel, nothing, [&](int64_t panel, int64_t first_row, int64_t last_row) {
    const uint8_t* start = weight.panels + panel * bytes;
    multiply_panel<Product, Finish>(start, panel * kPanelColumns, num_steps, first_row, last_row, weight, x, output);
  });
}
