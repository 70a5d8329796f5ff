// The products of prefill on AMX, 32 rows at a time. K and V lie in blocks as its tiles want them; V in int8 is widened to bfloat16, which
// holds every level exactly. Include inside a namespace of the ISA, after the vector operations.

constexpr int kTileRows = 16;  // of an AMX tile, and its columns of 32 bits
constexpr int kChunkTokens = 32;  // of V in one AMX tile

// The compiler does not know that tile instructions read and write memory.
[[gnu::always_inline]] static inline void memory_barrier() { asm volatile("" ::: "memory"); }

// All eight tiles are 16 rows of 64 bytes. 0 … 3 hold sums, [rows][columns] in twos; 4 and 5 rows; 6 and 7 columns.
class TileConfig {
 public:
  TileConfig() {
    alignas(64) uint8_t config[64] = {};
    config[0] = 1;  // the palette
    for (int tile = 0; tile < 8; ++tile) {
      config[16 + 2 * tile] = 64;
      config[48 + tile] = kTileRows;
    }
    memory_barrier();
    _tile_loadconfig(config);
  }
  ~TileConfig() { _tile_release(); }
};

// Where the pairs of V are, and room for those that cannot be used where they lie.
struct alignas(64) ValueChunks {
  const uint16_t* start[kTileTokens / kChunkTokens];  // [kChunkTokens / 2][head_dim][2] bfloat16 each
  uint16_t copies[kTileTokens * kMaxHeadDim];
};

static ValueChunks& value_chunks() {
  thread_local std::unique_ptr<ValueChunks> instance(new ValueChunks());
  return *instance;
}

struct AmxBf16 : Bf16 {
  static constexpr int kBytesPerDim = 2;
  static constexpr bool kIsCopied = false;

  [[gnu::always_inline]] static inline void multiply_all() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  static Floats scaled(const float* sums, const Workspace& w, int row, int) { return mul(load(sums), set1(w.query_scales[row])); }
  static void copy_values(const uint8_t* values, int count, uint16_t* out) { std::memcpy(out, values, static_cast<size_t>(count) * 2); }
};

struct AmxInt8 : Int8 {
  static constexpr int kBytesPerDim = 1;
  static constexpr bool kIsCopied = true;

  [[gnu::always_inline]] static inline void multiply_all() {
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    _tile_dpbsud(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
  }
  static Floats scaled(const float* sums, const Workspace& w, int row, int token) {
    const Ints sum = _mm512_add_epi32(load_words(sums), set1(w.query_offsets[row]));
    return mul(to_floats(sum), mul(load(w.key_scales + token), set1(w.query_scales[row])));
  }
  static void copy_values(const uint8_t* values, int count, uint16_t* out) {
    for (int i = 0; i < count; i += kLanes) {
      const __m128i levels = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values + i));
      store_bf16(out + i, to_floats(_mm512_cvtepi8_epi32(levels)));
    }
  }
};

// The weights of int8 values in bfloat16, multiplied by the values' scales.
static Floats make_weights(AmxInt8, const Tile& tile, Workspace& w, int r, Floats maximum) {
  Floats sum = set1(0.0f);
  for (int token = tile.from / kLanes * kLanes; token < tile.to; token += kLanes) {
    const Floats weight = exp2(sub(load(w.scores[r] + token), maximum));
    sum = add(sum, weight);
    store_bf16(w.weights[r] + token, mul(weight, load(w.value_scales + token)));
  }
  return sum;
}

struct AmxProducts {
  static constexpr int kRows = 2 * kTileRows;

  // Finds the chunks of V. Those that lie in two blocks, and those with tokens out of range, which may be NaN, are copied.
  template <class Kv>
  static void open(const Tile& tile, Workspace&) {
    ValueChunks& chunks = value_chunks();
    for (int chunk = tile.from / kChunkTokens; chunk * kChunkTokens < tile.to; ++chunk) {
      const int token = chunk * kChunkTokens;
      const bool is_whole = token >= tile.from && token + kChunkTokens <= tile.to && tile.block_size >= kChunkTokens;
      if (!Kv::kIsCopied && is_whole) {
        chunks.start[chunk] = reinterpret_cast<const uint16_t*>(values_at<Kv>(tile, token));
      } else {
        uint16_t* copy = chunks.copies + token * tile.head_dim;
        copy_chunk<Kv>(tile, token, copy);
        chunks.start[chunk] = copy;
      }
    }
  }

  template <class Kv>
  [[gnu::noinline]] static void score(const Tile& tile, const RowGroup& rows, Workspace& w) {
    const int words = tile.head_dim / Kv::kDimsPerWord;
    const int64_t query_stride = int64_t{words} * 4;
    const int64_t key_stride = int64_t{tile.block_size} * 4;
    const int32_t* queries = w.queries + rows.first * words;
    memory_barrier();
    for (int token = tile.from / kTileRows * kTileRows; token < tile.to; token += 2 * kTileRows) {
      const bool has_second = token + kTileRows < tile.to;
      const uint8_t* keys = keys_at(tile, token);
      const uint8_t* more_keys = has_second ? keys_at(tile, token + kTileRows) : keys;
      zero_sums();
      for (int word = 0; word < words; word += kTileRows) {
        _tile_loadd(4, queries + word, query_stride);
        _tile_loadd(5, queries + kTileRows * words + word, query_stride);
        _tile_loadd(6, keys + word * key_stride, key_stride);
        _tile_loadd(7, more_keys + word * key_stride, key_stride);
        Kv::multiply_all();
      }
      _tile_stored(0, w.scores[0] + token, kScoreStride * 4);
      _tile_stored(2, w.scores[kTileRows] + token, kScoreStride * 4);
      if (!has_second) continue;
      _tile_stored(1, w.scores[0] + token + kTileRows, kScoreStride * 4);
      _tile_stored(3, w.scores[kTileRows] + token + kTileRows, kScoreStride * 4);
    }
    memory_barrier();
    for (int r = 0; r < rows.count; ++r) {
      for (int token = tile.from / kLanes * kLanes; token < tile.to; token += kLanes) {
        store(w.scores[r] + token, Kv::scaled(w.scores[r] + token, w, rows.first + r, token));
      }
    }
  }

  template <class Kv>
  [[gnu::noinline]] static void accumulate(const Tile& tile, const RowGroup& rows, Workspace& w) {
    fill_chunks(tile, rows, w);
    float* outputs = w.outputs + rows.first * tile.head_dim;
    rescale(outputs, rows.count, tile.head_dim, w);
    const ValueChunks& chunks = value_chunks();
    const int64_t stride = int64_t{tile.head_dim} * 4;  // of outputs, and of pairs of V
    memory_barrier();
    for (int dim = 0; dim < tile.head_dim; dim += 2 * kTileRows) {
      float* upper = outputs + dim;
      float* lower = upper + kTileRows * tile.head_dim;
      _tile_loadd(0, upper, stride);
      _tile_loadd(1, upper + kTileRows, stride);
      _tile_loadd(2, lower, stride);
      _tile_loadd(3, lower + kTileRows, stride);
      for (int chunk = tile.from / kChunkTokens; chunk * kChunkTokens < tile.to; ++chunk) {
        _tile_loadd(4, w.weights[0] + chunk * kChunkTokens, kWeightStride * 2);
        _tile_loadd(5, w.weights[kTileRows] + chunk * kChunkTokens, kWeightStride * 2);
        _tile_loadd(6, chunks.start[chunk] + dim * 2, stride);
        _tile_loadd(7, chunks.start[chunk] + (dim + kTileRows) * 2, stride);
        AmxBf16::multiply_all();
      }
      _tile_stored(0, upper, stride);
      _tile_stored(1, upper + kTileRows, stride);
      _tile_stored(2, lower, stride);
      _tile_stored(3, lower + kTileRows, stride);
    }
    memory_barrier();
  }

 private:
  static const uint8_t* keys_at(const Tile& tile, int token) { return tile.keys[token / tile.block_size] + token % tile.block_size * 4; }

  template <class Kv>
  static const uint8_t* values_at(const Tile& tile, int token) {
    return tile.values[token / tile.block_size] + token % tile.block_size * tile.head_dim * Kv::kBytesPerDim;
  }

  template <class Kv>
  static void copy_chunk(const Tile& tile, int token, uint16_t* out) {
    const int count = 2 * tile.head_dim;
    for (int pair = token; pair < token + kChunkTokens; pair += 2, out += count) {
      const bool has_first = pair >= tile.from && pair < tile.to;
      const bool has_second = pair + 1 >= tile.from && pair + 1 < tile.to;
      if (!has_first && !has_second) {
        std::memset(out, 0, static_cast<size_t>(count) * 2);
        continue;
      }
      Kv::copy_values(values_at<Kv>(tile, pair), count, out);
      if (has_first && has_second) continue;
      for (int i = has_first ? 1 : 0; i < count; i += 2) out[i] = 0;
    }
  }

  // Weights of the tokens of a chunk that are out of the tile's range.
  static void fill_chunks(const Tile& tile, const RowGroup& rows, Workspace& w) {
    const int first = tile.from / kLanes * kLanes;
    const int end = (tile.to + kLanes - 1) / kLanes * kLanes;
    for (int r = 0; r < rows.count; ++r) {
      if (first % kChunkTokens != 0) std::memset(w.weights[r] + first - kLanes, 0, kLanes * 2);
      if (end % kChunkTokens != 0) std::memset(w.weights[r] + end, 0, kLanes * 2);
    }
  }

  static void rescale(float* outputs, int num_rows, int head_dim, const Workspace& w) {
    for (int r = 0; r < num_rows; ++r) {
      if (w.rescales[r] == 1.0f) continue;
      float* output = outputs + r * head_dim;
      for (int dim = 0; dim < head_dim; dim += kLanes) store(output + dim, mul(load(output + dim), set1(w.rescales[r])));
    }
  }

  [[gnu::always_inline]] static inline void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
};

// Head dimensions that fill the tiles of both products.
static bool fits_tiles(const KvView& kv) { return kv.head_dim % (kv.type == KvType::kBf16 ? 32 : 64) == 0; }
