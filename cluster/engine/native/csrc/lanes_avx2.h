// Vectors of 16 lanes of 32 bits in AVX2, FMA and F16C; see `lanes_avx512.h`.
#include <immintrin.h>

namespace baton::avx2 {

#define BATON_INLINE inline __attribute__((always_inline))

// The 16 registers have room for the sums of 4 rows and 16 columns, or of one row and all columns of a panel.
constexpr int kTileRows = 4;
constexpr int tile_vectors(int num_rows) { return num_rows == 1 ? 2 : 1; }
constexpr int64_t kPrefetchBytes = 8192;
constexpr int64_t kGroupsAhead = 16;
constexpr bool kSumsHoldZeroPoint = false;

struct Floats {
  __m256 low, high;
};
struct Ints {
  __m256i low, high;
};
// Products of bytes are summed in 16 bits, which two of 255 × 127 do not fit. So channels lose their zero point as they are loaded, and
// products are those of their magnitudes and of levels that took over their signs: 2 × 128 × 127 at most.
struct SignedChannels {
  __m256i low, high, low_magnitudes, high_magnitudes;
};
using UnsignedChannels = SignedChannels;
struct Level {
  __m256i bytes;  // signed
};
using TokenLevel = Level;
using GroupLevel = Level;
struct Nibbles {
  __m256i low, high;
};
// Two of 16 bits for each lane: over a group they come to 16 × 15 × 127 = 30,480 at most.
struct NibbleSums {
  __m256i low, high;
};
struct Pairs {
  Floats even, odd;
};

BATON_INLINE Floats broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
BATON_INLINE Floats load(const float* values) { return {_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)}; }
BATON_INLINE void store(float* out, Floats values) {
  _mm256_storeu_ps(out, values.low);
  _mm256_storeu_ps(out + 8, values.high);
}
BATON_INLINE Floats load(const float* values, int count) {
  alignas(32) float lanes[16] = {};
  for (int i = 0; i < count; ++i) lanes[i] = values[i];
  return load(lanes);
}
BATON_INLINE void store(float* out, Floats values, int count) {
  alignas(32) float lanes[16];
  store(lanes, values);
  for (int i = 0; i < count; ++i) out[i] = lanes[i];
}
BATON_INLINE Floats load_halves(const uint8_t* halves) {
  const __m128i* parts = reinterpret_cast<const __m128i*>(halves);
  return {_mm256_cvtph_ps(_mm_loadu_si128(parts)), _mm256_cvtph_ps(_mm_loadu_si128(parts + 1))};
}

BATON_INLINE Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
BATON_INLINE Floats sub(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
BATON_INLINE Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
BATON_INLINE Floats div(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
BATON_INLINE Floats fma(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
BATON_INLINE Floats lesser(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
BATON_INLINE Floats greater(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }

BATON_INLINE __m256i load_half(const void* bytes) { return _mm256_loadu_si256(static_cast<const __m256i*>(bytes)); }
BATON_INLINE Ints load_ints(const void* values) { return {load_half(values), load_half(static_cast<const uint8_t*>(values) + 32)}; }
BATON_INLINE Ints broadcast_int(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
BATON_INLINE Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
BATON_INLINE Ints sub(Ints a, Ints b) { return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)}; }
BATON_INLINE Ints greater_int(Ints a, Ints b) { return {_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)}; }
BATON_INLINE Ints magnitude_bits(Floats values) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  return {_mm256_and_si256(_mm256_castps_si256(values.low), mask), _mm256_and_si256(_mm256_castps_si256(values.high), mask)};
}
BATON_INLINE int32_t greatest(Ints values) {
  const __m256i eight = _mm256_max_epi32(values.low, values.high);
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
BATON_INLINE int32_t sum(Ints values) {
  const __m256i eight = _mm256_add_epi32(values.low, values.high);
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
BATON_INLINE Floats to_floats(Ints values) { return {_mm256_cvtepi32_ps(values.low), _mm256_cvtepi32_ps(values.high)}; }
BATON_INLINE Floats as_floats(Ints bits) { return {_mm256_castsi256_ps(bits.low), _mm256_castsi256_ps(bits.high)}; }
BATON_INLINE Ints round_to_ints(Floats values) { return {_mm256_cvtps_epi32(values.low), _mm256_cvtps_epi32(values.high)}; }
BATON_INLINE Floats power_of_two(Ints exponents) {
  const Ints biased = add(exponents, broadcast_int(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(biased.low, 23)), _mm256_castsi256_ps(_mm256_slli_epi32(biased.high, 23))};
}

BATON_INLINE float tree_sum(Floats values) {
  const __m256 eight = _mm256_add_ps(values.low, values.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// The lowest byte of each.
BATON_INLINE void store_bytes(uint8_t* out, Ints values) {
  const __m256i mask = _mm256_set1_epi32(0xff);
  const __m256i words = _mm256_packus_epi32(_mm256_and_si256(values.low, mask), _mm256_and_si256(values.high, mask));
  const __m256i in_order = _mm256_permute4x64_epi64(words, 0xd8);
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(in_order), _mm256_extracti128_si256(in_order, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
}
// To the nearest, ties to even; a NaN stays one.
BATON_INLINE __m256i bf16_bits(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff)));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), is_nan), 16);
}
BATON_INLINE void store_bf16(uint8_t* out, Floats values) {
  const __m256i packed = _mm256_packus_epi32(bf16_bits(values.low), bf16_bits(values.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permute4x64_epi64(packed, 0xd8));
}

BATON_INLINE SignedChannels with_magnitudes(__m256i low, __m256i high) {
  return {low, high, _mm256_abs_epi8(low), _mm256_abs_epi8(high)};
}
BATON_INLINE __m256i without_zero_point(__m256i bytes) { return _mm256_xor_si256(bytes, _mm256_set1_epi8(-128)); }
BATON_INLINE SignedChannels load_signed(const uint8_t* bytes) { return with_magnitudes(load_half(bytes), load_half(bytes + 32)); }
BATON_INLINE UnsignedChannels load_unsigned(const uint8_t* bytes) {
  return with_magnitudes(without_zero_point(load_half(bytes)), without_zero_point(load_half(bytes + 32)));
}
BATON_INLINE __m256i broadcast_lane(const uint8_t* bytes) {
  int32_t lane;
  __builtin_memcpy(&lane, bytes, sizeof(lane));
  return _mm256_set1_epi32(lane);
}
BATON_INLINE GroupLevel broadcast_group(const uint8_t* bytes) { return {broadcast_lane(bytes)}; }
BATON_INLINE TokenLevel broadcast_token(const uint8_t* bytes) { return {broadcast_lane(bytes)}; }
BATON_INLINE Nibbles load_nibbles(const uint8_t* bytes) { return {load_half(bytes), load_half(bytes + 32)}; }
BATON_INLINE Nibbles low_nibbles(const uint8_t* bytes) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(load_half(bytes), mask), _mm256_and_si256(load_half(bytes + 32), mask)};
}
BATON_INLINE Nibbles high_nibbles(const uint8_t* bytes) {
  const __m256i mask = _mm256_set1_epi8(15);
  const __m256i low = _mm256_srli_epi16(load_half(bytes), 4);
  const __m256i high = _mm256_srli_epi16(load_half(bytes + 32), 4);
  return {_mm256_and_si256(low, mask), _mm256_and_si256(high, mask)};
}
BATON_INLINE Pairs widen_pairs(__m256i low, __m256i high) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000));
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))},
          {_mm256_castsi256_ps(_mm256_and_si256(low, mask)), _mm256_castsi256_ps(_mm256_and_si256(high, mask))}};
}
BATON_INLINE Pairs load_pairs(const uint8_t* bytes) { return widen_pairs(load_half(bytes), load_half(bytes + 32)); }
BATON_INLINE Pairs broadcast_pairs(const uint8_t* bytes) { return widen_pairs(broadcast_lane(bytes), broadcast_lane(bytes)); }

BATON_INLINE __m256i sum_pairs(__m256i values) { return _mm256_madd_epi16(values, _mm256_set1_epi16(1)); }
// GCC would put a chain of integer sums into another order, and has no registers for all the products that it then makes first.
BATON_INLINE __m256i here(__m256i sum) {
  __asm__("" : "+x"(sum));
  return sum;
}
BATON_INLINE __m256i dot_half(__m256i sums, __m256i magnitudes, __m256i channels, __m256i level) {
  return here(_mm256_add_epi32(sums, sum_pairs(_mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(level, channels)))));
}
BATON_INLINE Ints dot(Ints sums, SignedChannels channels, Level level) {
  return {dot_half(sums.low, channels.low_magnitudes, channels.low, level.bytes),
          dot_half(sums.high, channels.high_magnitudes, channels.high, level.bytes)};
}
BATON_INLINE Ints dot(Ints sums, Level level, SignedChannels channels) { return dot(sums, channels, level); }
BATON_INLINE NibbleSums dot(NibbleSums sums, Nibbles nibbles, Level level) {
  return {here(_mm256_add_epi16(sums.low, _mm256_maddubs_epi16(nibbles.low, level.bytes))),
          here(_mm256_add_epi16(sums.high, _mm256_maddubs_epi16(nibbles.high, level.bytes)))};
}
BATON_INLINE NibbleSums no_nibble_sums(int32_t) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
BATON_INLINE Ints total(NibbleSums sums, int32_t origin) {
  return add(Ints{sum_pairs(sums.low), sum_pairs(sums.high)}, broadcast_int(origin));
}
BATON_INLINE Floats dot(Floats sums, Pairs a, Pairs b) { return fma(a.even, b.even, fma(a.odd, b.odd, sums)); }

BATON_INLINE void prefetch(const uint8_t* bytes) { _mm_prefetch(reinterpret_cast<const char*>(bytes), _MM_HINT_T0); }

}  // namespace baton::avx2
