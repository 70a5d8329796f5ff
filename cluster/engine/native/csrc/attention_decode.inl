// Decode: one query token a sequence; what bounds it is the speed of reading the KV once. Include inside a namespace of the ISA.

// Some KV heads of one sequence.
struct DecodeUnit {
  int sequence;
  int first_head, end_head;
};

template <class Kv>
class DecodeTask {
 public:
  DecodeTask(const KvView& kv, const AttentionShape& shape, const DecodeBatch& batch, int heads_per_unit)
      : kv_(kv), shape_(shape), batch_(batch), heads_per_unit_(heads_per_unit), group_size_(shape.num_heads / kv.num_kv_heads),
        units_per_sequence_((kv.num_kv_heads + heads_per_unit - 1) / heads_per_unit), w_(workspace()) {}

  void run(int first_unit, int end_unit) {
    for (int index = first_unit; index < end_unit; ++index) {
      const DecodeUnit unit = unit_at(index);
      start(unit);
      const int last_tile = position(unit) / kTileTokens;
      for (int tile = first_tile(unit); tile <= last_tile; ++tile) {
        prefetch_.clear();
        if (tile < last_tile) {
          plan_prefetch(unit, tile + 1);
        } else if (index + 1 < end_unit) {
          const DecodeUnit next = unit_at(index + 1);
          plan_prefetch(next, first_tile(next));
        }
        attend(unit, tile);
      }
      finish(unit);
    }
  }

 private:
  DecodeUnit unit_at(int index) const {
    const int first_head = index % units_per_sequence_ * heads_per_unit_;
    const int end_head = first_head + heads_per_unit_;
    return {index / units_per_sequence_, first_head, end_head < kv_.num_kv_heads ? end_head : kv_.num_kv_heads};
  }
  int position(const DecodeUnit& unit) const { return batch_.context_lens[unit.sequence] - 1; }
  int first_tile(const DecodeUnit& unit) const { return first_visible(position(unit), shape_.window) / kTileTokens; }
  int end_in_tile(const DecodeUnit& unit, int tile) const {
    const int to = position(unit) + 1 - tile * kTileTokens;
    return to < kTileTokens ? to : kTileTokens;
  }
  int start_in_tile(const DecodeUnit& unit, int tile) const {
    const int from = first_visible(position(unit), shape_.window) - tile * kTileTokens;
    return from > 0 ? from : 0;
  }
  const int32_t* block_table(const DecodeUnit& unit) const { return batch_.block_tables + unit.sequence * batch_.table_stride; }

  void start(const DecodeUnit& unit) {
    const int num_rows = (unit.end_head - unit.first_head) * group_size_;
    const float* queries = batch_.queries + unit.sequence * batch_.query_stride + int64_t{unit.first_head} * group_size_ * kv_.head_dim;
    clear_state(w_, num_rows, kv_.head_dim);
    for (int row = 0; row < num_rows; ++row) {
      Kv::prepare_query(queries + int64_t{row} * kv_.head_dim, kv_.head_dim, shape_.scale * kLog2E, w_, row);
    }
  }

  void attend(const DecodeUnit& unit, int tile_index) {
    const int from = start_in_tile(unit, tile_index);
    const int to = end_in_tile(unit, tile_index);
    const int num_groups = (group_size_ + kMaxRows - 1) / kMaxRows;
    Tile tile;
    for (int head = unit.first_head; head < unit.end_head; ++head) {
      open_tile<Kv>(kv_, block_table(unit), head, tile_index * kTileTokens, from, to, tile, w_);
      const int first_row = (head - unit.first_head) * group_size_;
      for (int group = 0; group < num_groups; ++group) {
        const int begin = group_size_ * group / num_groups;
        const RowGroup rows{first_row + begin, group_size_ * (group + 1) / num_groups - begin};
        score_keys<Kv>(tile, rows, w_, prefetch_);
        for (int r = 0; r < rows.count; ++r) softmax_row<Kv>(tile, from, to, r, rows.first + r, w_);
        accumulate_values<Kv>(tile, rows, w_, prefetch_);
      }
    }
  }

  void finish(const DecodeUnit& unit) {
    const int num_rows = (unit.end_head - unit.first_head) * group_size_;
    float* out = batch_.out + (int64_t{unit.sequence} * shape_.num_heads + int64_t{unit.first_head} * group_size_) * kv_.head_dim;
    for (int row = 0; row < num_rows; ++row) write_output(w_, row, kv_.head_dim, out + int64_t{row} * kv_.head_dim);
  }

  void plan_prefetch(const DecodeUnit& unit, int tile) {
    const int32_t* table = block_table(unit) + tile * kTileTokens / kv_.block_size;
    const int to = end_in_tile(unit, tile);
    const int64_t bytes = (unit.end_head - unit.first_head) * kv_.head_stride;
    for (int block = start_in_tile(unit, tile) / kv_.block_size; block * kv_.block_size < to; ++block) {
      prefetch_.plan(kv_.keys(table[block], unit.first_head), bytes);
      prefetch_.plan(kv_.values(table[block], unit.first_head), bytes);
    }
  }

  const KvView& kv_;
  const AttentionShape& shape_;
  const DecodeBatch& batch_;
  const int heads_per_unit_;
  const int group_size_;
  const int units_per_sequence_;
  Workspace& w_;
  PlannedPrefetch& prefetch_ = planned_prefetch();
};
