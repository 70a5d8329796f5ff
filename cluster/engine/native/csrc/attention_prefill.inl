// Prefill: many query tokens of one sequence; what bounds it is the speed of the products. Include inside a namespace of the ISA.

// Some query tokens and one KV head: rows in the order [token][query head of the group]. `Products` multiplies.
template <class Kv, class Products>
class PrefillTask {
 public:
  PrefillTask(const KvView& kv, const AttentionShape& shape, const PrefillChunk& chunk)
      : kv_(kv), shape_(shape), chunk_(chunk), group_size_(shape.num_heads / kv.num_kv_heads), w_(workspace()) {}

  void run(int head, int first_token, int num_tokens) {
    head_ = head;
    first_token_ = first_token;
    num_rows_ = num_tokens * group_size_;
    clear_state(w_, num_rows_, kv_.head_dim);
    for (int row = 0; row < num_rows_; ++row) {
      Kv::prepare_query(chunk_.queries + (first_token + row / group_size_) * chunk_.query_stride + head_dims(row), kv_.head_dim,
                        shape_.scale * kLog2E, w_, row);
    }
    const int end_tile = position(num_rows_ - 1) / kTileTokens + 1;
    for (int tile = visible_from(0) / kTileTokens; tile < end_tile; ++tile) attend(tile);
    for (int row = 0; row < num_rows_; ++row) {
      const int64_t token = first_token + row / group_size_;
      write_output(w_, row, kv_.head_dim, chunk_.out + token * shape_.num_heads * kv_.head_dim + head_dims(row));
    }
  }

 private:
  int64_t head_dims(int row) const { return int64_t{head_ * group_size_ + row % group_size_} * kv_.head_dim; }
  int position(int row) const { return chunk_.first_position + first_token_ + row / group_size_; }
  int visible_from(int row) const { return first_visible(position(row), shape_.window); }

  void attend(int tile_index) {
    const int start = tile_index * kTileTokens;
    Tile tile;
    const int from = clamped(visible_from(0) - start);
    const int to = clamped(position(num_rows_ - 1) + 1 - start);
    open_tile<Kv>(kv_, chunk_.block_table, head_, start, from, to, tile, w_);
    Products::template open<Kv>(tile, w_);
    for (int row = 0; row < num_rows_; row += Products::kRows) {
      const RowGroup rows{row, least(Products::kRows, num_rows_ - row)};
      attend_rows(tile, start, rows);
    }
  }

  // The keys that none of them sees are left out.
  void attend_rows(Tile& tile, int start, const RowGroup& rows) {
    tile.from = clamped(visible_from(rows.first) - start);
    tile.to = clamped(position(rows.first + rows.count - 1) + 1 - start);
    if (tile.from >= tile.to) return;
    Products::template score<Kv>(tile, rows, w_);
    for (int r = 0; r < rows.count; ++r) {
      const int row = rows.first + r;
      softmax_row<Kv>(tile, visible_from(row) - start, position(row) + 1 - start, r, row, w_);
    }
    Products::template accumulate<Kv>(tile, rows, w_);
  }

  static int clamped(int token) { return token < 0 ? 0 : token < kTileTokens ? token : kTileTokens; }

  const KvView& kv_;
  const AttentionShape& shape_;
  const PrefillChunk& chunk_;
  const int group_size_;
  Workspace& w_;
  int head_ = 0;
  int first_token_ = 0;
  int num_rows_ = 0;
};
