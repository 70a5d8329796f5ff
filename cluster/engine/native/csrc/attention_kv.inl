// What differs between bf16 and int8 KV: how a query is prepared, a word is multiplied, a score and an output are made of the sums.
// Include inside a namespace of the ISA.

// A cache line more than a tile, or rows would compete for few sets of the L1 cache.
constexpr int kScoreStride = kTileTokens + 16;
constexpr int kWeightStride = kTileTokens + 32;
constexpr float kHidden = -1e30f;  // a score whose weight is exactly 0
constexpr float kNegligible = 1e-30f;  // what is below counts as 0: its reciprocal might overflow
constexpr float kMaxLevel = 32767.0f;  // of a weight in 16 bits: 256 of them times 127 fit 32 bits

static int least(int a, int b) { return a < b ? a : b; }

// The keys and values of one KV head that some rows see within one tile.
struct Tile {
  int from, to;  // tokens, relative to the tile's first
  int block_size;
  int head_dim;
  const uint8_t* keys[kTileTokens / kMinBlockSize];  // a block's K and V of this head, for the blocks that hold from … to - 1
  const uint8_t* values[kTileTokens / kMinBlockSize];
};

// Rows that share loads, `count` of them from state row `first` on.
struct RowGroup {
  int first;
  int count;
};

// The first position that a query sees.
static int first_visible(int position, int window) { return position + 1 > window ? position + 1 - window : 0; }

// All that a thread needs; outputs, maxima, sums and queries are indexed by state row, the others by row of a register tile.
struct alignas(64) Workspace {
  float outputs[kMaxStateRows * kMaxHeadDim];
  int32_t queries[kMaxStateRows * kMaxHeadDim / 2 * Bf16Words::kParts];
  float scores[kScoreRows][kScoreStride];
  uint16_t weights[kScoreRows][kWeightStride];
  float key_scales[kTileTokens];  // int8 only, as is the next
  float value_scales[kTileTokens];
  float maxima[kMaxStateRows];
  float sums[kMaxStateRows];
  float query_scales[kMaxStateRows];     // of the dot products, the softmax scale included
  int32_t query_offsets[kMaxStateRows];  // int8: what K's zero point adds to a dot product, negated
  float rescales[kScoreRows];       // of the outputs so far
  float weight_scales[kScoreRows];  // int8 only
};

static Workspace& workspace() {
  thread_local std::unique_ptr<Workspace> instance(new Workspace());
  return *instance;
}

struct Bf16 : Bf16Words {
  static constexpr int kDimsPerWord = 2;
  static constexpr int kKeyParts = kParts;
  static constexpr int kValueParts = kParts;
  static constexpr bool kHasScales = false;
  using KeySum = Floats;
  using ValueSum = Floats;

  static void prepare_query(const float* query, int head_dim, float scale, Workspace& w, int row) {
    auto* factors = reinterpret_cast<Factor*>(w.queries + row * (head_dim / kDimsPerWord * kKeyParts));
    for (int dim = 0; dim < head_dim; dim += kLanes) store_query(factors + dim, load(query + dim));
    w.query_scales[row] = scale;
  }

  [[gnu::always_inline]] static inline KeySum first_key_sum(const Workspace&, int) { return set1(0.0f); }
  template <int PART>
  [[gnu::always_inline]] static inline Operand query(const int32_t* words, int, int word) {
    return factor<PART>(reinterpret_cast<const Factor*>(words) + word * kDimsPerWord);
  }
  [[gnu::always_inline]] static inline Floats score(KeySum sum, const Workspace& w, int row, int) {
    return mul(sum, set1(w.query_scales[row]));
  }

  static constexpr int kValueWordBytes = 4;
  [[gnu::always_inline]] static inline Ints load_values(const uint8_t* values) { return load_words(values); }
  [[gnu::always_inline]] static inline Ints mask_values(Ints values, int32_t mask) { return mask_words(values, mask); }
  [[gnu::always_inline]] static inline ValueSum first_value_sum(const float* output, Floats rescale) { return mul(load(output), rescale); }
  template <int PART>
  [[gnu::always_inline]] static inline Operand value_part(Ints values) {
    return part<PART>(values);
  }
  [[gnu::always_inline]] static inline ValueSum add_values(ValueSum sum, Operand values, Operand weights) {
    return dot(sum, values, weights);
  }
  [[gnu::always_inline]] static inline Floats output(ValueSum sum, const float*, Floats, float) { return sum; }
};

struct Int8 : ByteWords {
  using Operand = Ints;
  using Factor = uint16_t;  // a weight
  static constexpr int kDimsPerWord = 4;
  static constexpr int kKeyParts = kParts;
  static constexpr int kValueParts = 1;
  static constexpr bool kHasScales = true;
  using KeySum = Ints;
  using ValueSum = Ints;

  static void prepare_query(const float* query, int head_dim, float scale, Workspace& w, int row) {
    int32_t* words = w.queries + row * (head_dim / kDimsPerWord * kKeyParts);
    auto* levels = reinterpret_cast<int8_t*>(words);
    Floats largest = set1(0.0f);
    for (int dim = 0; dim < head_dim; dim += kLanes) largest = max(largest, abs(load(query + dim)));
    const float magnitude = reduce_max(largest);
    const Floats inverse = set1(magnitude > kNegligible ? 127.0f / magnitude : 0.0f);
    for (int dim = 0; dim < head_dim; dim += kLanes) store_int8(levels + dim, mul(load(query + dim), inverse));
    int32_t sum = 0;
    for (int dim = 0; dim < head_dim; ++dim) sum += levels[dim];
    split_query(words, head_dim / kDimsPerWord);
    w.query_offsets[row] = -128 * sum;
    w.query_scales[row] = magnitude / 127.0f * scale;
  }

  [[gnu::always_inline]] static inline KeySum first_key_sum(const Workspace& w, int row) { return set1(w.query_offsets[row]); }
  [[gnu::always_inline]] static inline Floats score(KeySum sum, const Workspace& w, int row, int token) {
    return mul(to_floats(sum), mul(load(w.key_scales + token), set1(w.query_scales[row])));
  }

  static constexpr int kValueWordBytes = 2;
  [[gnu::always_inline]] static inline Ints load_values(const uint8_t* values) { return load_widened(values); }
  [[gnu::always_inline]] static inline Ints mask_values(Ints values, int32_t) { return values; }  // any integer times 0 is 0
  [[gnu::always_inline]] static inline ValueSum first_value_sum(const float*, Floats) { return set1(0); }
  [[gnu::always_inline]] static inline Factor* weights(Workspace& w, int r) { return w.weights[r]; }
  template <int PART>
  [[gnu::always_inline]] static inline Ints factor(const Factor* pair) {
    int32_t word;
    std::memcpy(&word, pair, sizeof word);
    return set1(word);
  }
  template <int PART>
  [[gnu::always_inline]] static inline Ints value_part(Ints values) {
    return values;
  }
  [[gnu::always_inline]] static inline ValueSum add_values(ValueSum sum, Ints values, Ints weights) {
    return dot_int16(sum, values, weights);
  }
  [[gnu::always_inline]] static inline Floats output(ValueSum sum, const float* output, Floats rescale, float weight_scale) {
    return fma(to_floats(sum), set1(weight_scale), mul(load(output), rescale));
  }
};
