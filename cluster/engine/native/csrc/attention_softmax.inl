// One step of the online softmax. Include inside a namespace of the ISA.

// Hides what of a row's scores is not in from … to - 1, within the vectors of the tile's range.
static void hide_scores(const Tile& tile, int from, int to, float* scores) {
  for (int token = tile.from / kLanes * kLanes; token < tile.to; token += kLanes) {
    if (token >= from && token + kLanes <= to) continue;
    store(scores + token, keep_lanes(load(scores + token), from - token, to - token, kHidden));
  }
}

// The weights of bf16 values are stored as what multiplies their words. Returns their sum.
static Floats make_weights(Bf16, const Tile& tile, Workspace& w, int r, Floats maximum) {
  Bf16::Factor* weights = Bf16::weights(w, r);
  Floats sum = set1(0.0f);
  for (int token = tile.from / kLanes * kLanes; token < tile.to; token += kLanes) {
    const Floats weight = exp2(sub(load(w.scores[r] + token), maximum));
    sum = add(sum, weight);
    Bf16::store_weights(weights + token, weight);
  }
  return sum;
}

// The weights of int8 values are multiplied by the values' scales, then quantized to 16 bits with one scale a tile.
[[maybe_unused]] static Floats make_weights(Int8, const Tile& tile, Workspace& w, int r, Floats maximum) {
  Floats sum = set1(0.0f);
  Floats largest = set1(0.0f);
  const int start = tile.from / kLanes * kLanes;
  for (int token = start; token < tile.to; token += kLanes) {
    const Floats weight = exp2(sub(load(w.scores[r] + token), maximum));
    sum = add(sum, weight);
    const Floats scaled = mul(weight, load(w.value_scales + token));
    largest = max(largest, scaled);
    store(w.scores[r] + token, scaled);
  }
  const float top = reduce_max(largest);
  w.weight_scales[r] = top * (1.0f / kMaxLevel);
  const Floats inverse = set1(top > kNegligible ? kMaxLevel / top : 0.0f);
  for (int token = start; token < tile.to; token += kLanes) store_int16(w.weights[r] + token, mul(load(w.scores[r] + token), inverse));
  return sum;
}

// Turns row r's scores of the keys from … to - 1 into weights.
template <class Kv>
void softmax_row(const Tile& tile, int from, int to, int r, int state_row, Workspace& w) {
  from = from > tile.from ? from : tile.from;
  to = to < tile.to ? to : tile.to;
  if (from >= to) {  // nothing for this row here: its state stays as it is
    const int start = tile.from / kLanes * kLanes;
    const int end = (tile.to + kLanes - 1) / kLanes * kLanes;
    std::memset(Kv::weights(w, r) + start, 0, static_cast<size_t>(end - start) * sizeof(typename Kv::Factor));
    w.rescales[r] = 1.0f;
    w.weight_scales[r] = 0.0f;
    return;
  }
  hide_scores(tile, from, to, w.scores[r]);
  Floats maxima = set1(w.maxima[state_row]);
  for (int token = from / kLanes * kLanes; token < to; token += kLanes) maxima = max(maxima, load(w.scores[r] + token));
  const float maximum = reduce_max(maxima);
  const float rescale = first(exp2(set1(w.maxima[state_row] - maximum)));
  const Floats sum = make_weights(Kv(), tile, w, r, set1(maximum));
  w.maxima[state_row] = maximum;
  w.sums[state_row] = w.sums[state_row] * rescale + reduce_add(sum);
  w.rescales[r] = rescale;
}

static void clear_state(Workspace& w, int num_rows, int head_dim) {
  std::memset(w.outputs, 0, static_cast<size_t>(num_rows) * head_dim * sizeof(float));
  for (int row = 0; row < num_rows; ++row) {
    w.maxima[row] = kHidden;
    w.sums[row] = 0.0f;
  }
}

static void write_output(const Workspace& w, int row, int head_dim, float* out) {
  const Floats sum = set1(w.sums[row]);
  for (int dim = 0; dim < head_dim; dim += kLanes) store(out + dim, div(load(w.outputs + row * head_dim + dim), sum));
}

// Where a tile's keys and values are, and their scales if they have any.
template <class Kv>
void open_tile(const KvView& kv, const int32_t* block_table, int head, int tile_start, int from, int to, Tile& tile, Workspace& w) {
  tile.from = from;
  tile.to = to;
  tile.block_size = kv.block_size;
  tile.head_dim = kv.head_dim;
  const int32_t* table = block_table + tile_start / kv.block_size;
  for (int block = from / kv.block_size; block * kv.block_size < to; ++block) {
    tile.keys[block] = kv.keys(table[block], head);
    tile.values[block] = tile.keys[block] + kv.kv_stride;
  }
  if constexpr (Kv::kHasScales) {
    const int64_t scales = kv.data_bytes();
    for (int token = from / kLanes * kLanes; token < to; token += kLanes) {
      const int block = token / kv.block_size;
      const int64_t offset = scales + token % kv.block_size * 2;
      store(w.key_scales + token, load_fp16(tile.keys[block] + offset));
      // Scales of unused tokens may be NaN.
      store(w.value_scales + token, keep_lanes(load_fp16(tile.values[block] + offset), from - token, to - token, 0.0f));
    }
  }
}
