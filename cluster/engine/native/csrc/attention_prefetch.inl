// Prefetching into the L2 cache what will be used next, spread over the loads of what is used now. Include inside a namespace of the ISA.

struct NoPrefetch {
  template <int BYTES>
  [[gnu::always_inline]] void step() {}
};

// Bytes in the order in which they will be fetched, in pieces.
class PlannedPrefetch {
 public:
  void clear() { next_ = num_pieces_ = 0; }

  void plan(const uint8_t* start, int64_t bytes) {
    for (int64_t offset = 0; offset < bytes && num_pieces_ < kMaxPieces; offset += kPieceBytes) {
      pieces_[num_pieces_++] = start + (offset + kPieceBytes <= bytes || offset == 0 ? offset : bytes - kPieceBytes);
    }
  }

  // At every load of BYTES.
  template <int BYTES>
  [[gnu::always_inline]] void step() {
    constexpr int kNumPieces = BYTES > kPieceBytes ? BYTES / kPieceBytes : 1;
#pragma GCC unroll 4
    for (int i = 0; i < kNumPieces; ++i) {
      if (next_ >= num_pieces_) return;
      const uint8_t* piece = pieces_[next_++];
#pragma GCC unroll 4
      for (int line = 0; line < kPieceBytes / 64; ++line) __builtin_prefetch(piece + line * 64, 0, 2);
    }
  }

 private:
  static constexpr int kMaxPieces = (512 << 10) / kPieceBytes;
  int next_ = 0;
  int num_pieces_ = 0;
  const uint8_t* pieces_[kMaxPieces];
};

static PlannedPrefetch& planned_prefetch() {
  thread_local std::unique_ptr<PlannedPrefetch> instance(new PlannedPrefetch());
  return *instance;
}
