// Chains of one operation each, independent of one another, so that throughput counts and not latency. Include inside a namespace of
// the ISA, after its intrinsics.

// The same value; the compiler must take it for another.
template <class V>
[[gnu::always_inline]] static inline V opaque(V value) {
  asm volatile("" : "+v"(value));
  return value;
}

template <int kCount, class V, class Op>
[[gnu::always_inline]] static inline void run_chains(int64_t num_rounds, V start, Op op) {
  V sums[kCount];
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) sums[i] = opaque(start);
  for (int64_t round = 0; round < num_rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) sums[i] = opaque(op(sums[i]));
  }
}
