// The two products of a tile, each for a register tile of rows: queries by keys, and softmax weights by values.
// Include inside a namespace of the ISA.

// Calls function(std::integral_constant<int, count>) for 1 <= count <= MAX.
template <int MAX, class Function>
[[gnu::always_inline]] inline void with_constant(int count, Function function) {
  if constexpr (MAX > 1) {
    if (count < MAX) return with_constant<MAX - 1>(count, function);
  }
  function(std::integral_constant<int, MAX>());
}

// Calls function(std::integral_constant<int, 0>) … function(std::integral_constant<int, COUNT - 1>).
template <int COUNT, class Function>
[[gnu::always_inline]] inline void for_each_part(Function function) {
  if constexpr (COUNT > 1) for_each_part<COUNT - 1>(function);
  function(std::integral_constant<int, COUNT - 1>());
}

// Scores of VECTORS * kLanes tokens from `token` on.
template <class Kv, int ROWS, int VECTORS, class Prefetch>
[[gnu::noinline]] void score_vectors(const Tile& tile, int first_row, int token, Workspace& w, Prefetch& prefetch) {
  const int num_words = tile.head_dim / Kv::kDimsPerWord;
  const int64_t stride = static_cast<int64_t>(tile.block_size) * 4;
  const int query_words = num_words * Kv::kKeyParts;
  const int32_t* queries = w.queries + first_row * query_words;
  const uint8_t* keys[VECTORS];
  for (int v = 0; v < VECTORS; ++v) {
    const int start = token + v * kLanes;
    keys[v] = tile.keys[start / tile.block_size] + start % tile.block_size * 4;
  }
  typename Kv::KeySum sums[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) sums[r][v] = Kv::first_key_sum(w, first_row + r);
  }
  for (int word = 0; word < num_words; ++word) {
    prefetch.template step<VECTORS * int{sizeof(Ints)}>();
    for_each_part<Kv::kKeyParts>([&](auto part) __attribute__((always_inline)) {
      typename Kv::Operand loaded[VECTORS];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) loaded[v] = Kv::template part<part>(load_words(keys[v] + word * stride));
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const typename Kv::Operand query = Kv::template query<part>(queries + r * query_words, num_words, word);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = Kv::dot(sums[r][v], loaded[v], query);
      }
    });
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      store(w.scores[r] + token + v * kLanes, Kv::score(sums[r][v], w, first_row + r, token + v * kLanes));
    }
  }
}

template <class Kv, class Prefetch>
void score_keys(const Tile& tile, const RowGroup& rows, Workspace& w, Prefetch& prefetch) {
  const int end = (tile.to + kLanes - 1) / kLanes;
  with_constant<kMaxRows>(rows.count, [&](auto num_rows) {
    constexpr int kMost = max_vectors(num_rows);
    for (int v = tile.from / kLanes; v < end; v += kMost) {
      with_constant<kMost>(least(end - v, kMost), [&](auto num_vectors) {
        score_vectors<Kv, num_rows, num_vectors>(tile, rows.first, v * kLanes, w, prefetch);
      });
    }
  });
}

// Adds the tile to VECTORS * kLanes dimensions of the outputs, from `dim` on.
template <class Kv, int ROWS, int VECTORS, class Prefetch>
[[gnu::noinline]] void accumulate_vectors(const Tile& tile, int first_row, int dim, Workspace& w, Prefetch& prefetch) {
  float* outputs = w.outputs + first_row * tile.head_dim + dim;
  const int64_t stride = static_cast<int64_t>(tile.head_dim) * Kv::kValueWordBytes;
  typename Kv::ValueSum sums[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) sums[r][v] = Kv::first_value_sum(outputs + r * tile.head_dim + v * kLanes, set1(w.rescales[r]));
  }
  auto add_pairs = [&](int token, int end, auto is_masked, int32_t mask) __attribute__((always_inline)) {
    const int in_block = token % tile.block_size;
    const uint8_t* values = tile.values[token / tile.block_size] + in_block / 2 * stride + dim * Kv::kValueWordBytes;
    for (; token < end; token += 2, values += stride) {
      prefetch.template step<VECTORS * kLanes * Kv::kValueWordBytes>();
      for_each_part<Kv::kValueParts>([&](auto part) __attribute__((always_inline)) {
        typename Kv::Operand loaded[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) {
          Ints words = Kv::load_values(values + v * kLanes * Kv::kValueWordBytes);
          if constexpr (is_masked) words = Kv::mask_values(words, mask);
          loaded[v] = Kv::template value_part<part>(words);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
          const typename Kv::Operand weights = Kv::template factor<part>(Kv::weights(w, r) + token);
#pragma GCC unroll 8
          for (int v = 0; v < VECTORS; ++v) sums[r][v] = Kv::add_values(sums[r][v], loaded[v], weights);
        }
      });
    }
  };
  // Of a pair that is only half in range, the other half may hold anything, NaN for one: 0 * NaN would not be 0.
  int token = tile.from;
  if (token % 2 == 1) {
    add_pairs(token - 1, token + 1, std::true_type(), static_cast<int32_t>(0xffff0000));
    ++token;
  }
  const int whole_end = tile.to / 2 * 2;
  while (token < whole_end) {
    const int block_end = (token / tile.block_size + 1) * tile.block_size;
    const int end = block_end < whole_end ? block_end : whole_end;
    add_pairs(token, end, std::false_type(), 0);
    token = end;
  }
  if (tile.to % 2 == 1 && tile.to > tile.from && token < tile.to) add_pairs(token, token + 1, std::true_type(), 0xffff);
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      float* output = outputs + r * tile.head_dim + v * kLanes;
      store(output, Kv::output(sums[r][v], output, set1(w.rescales[r]), w.weight_scales[r]));
    }
  }
}

template <class Kv, class Prefetch>
void accumulate_values(const Tile& tile, const RowGroup& rows, Workspace& w, Prefetch& prefetch) {
  const int end = tile.head_dim / kLanes;
  with_constant<kMaxRows>(rows.count, [&](auto num_rows) {
    constexpr int kMost = max_vectors(num_rows);
    for (int v = 0; v < end; v += kMost) {
      with_constant<kMost>(least(end - v, kMost), [&](auto num_vectors) {
        accumulate_vectors<Kv, num_rows, num_vectors>(tile, rows.first, v * kLanes, w, prefetch);
      });
    }
  });
}

// The products as `PrefillTask` takes them.
struct VectorProducts {
  static constexpr int kRows = kMaxRows;

  template <class Kv>
  static void open(const Tile&, Workspace&) {}

  template <class Kv>
  static void score(const Tile& tile, const RowGroup& rows, Workspace& w) {
    NoPrefetch prefetch;
    score_keys<Kv>(tile, rows, w, prefetch);
  }

  template <class Kv>
  static void accumulate(const Tile& tile, const RowGroup& rows, Workspace& w) {
    NoPrefetch prefetch;
    accumulate_values<Kv>(tile, rows, w, prefetch);
  }
};
