// Vectors of 16 lanes of 32 bits in AVX-512. The other `lanes_*.h` define the same names; a kernel written over them rounds alike in all.
#include <immintrin.h>

namespace baton::avx512 {

#define BATON_INLINE inline __attribute__((always_inline))

constexpr int kTileRows = 8;
constexpr int tile_vectors(int) { return 2; }  // of 16 output columns, in a tile of so many rows
constexpr int64_t kPrefetchBytes = 4096;  // ahead of the weights that are multiplied
constexpr int64_t kGroupsAhead = 8;       // the same for W4A8
// Whether sums of products with bytes of zero point 128 hold what that adds, for the kernel to take off.
constexpr bool kSumsHoldZeroPoint = true;

using Floats = __m512;
using Ints = __m512i;
// 4 bytes along k a lane: of each output channel, or the same of one row of activations in every lane.
using UnsignedChannels = __m512i;  // with zero point 128
using SignedChannels = __m512i;
using Nibbles = __m512i;  // 0…15
using TokenLevel = __m512i;  // with zero point 128
using GroupLevel = __m512i;  // signed
using NibbleSums = __m512i;  // of products of nibbles and levels over one group
using Pairs = __m512i;  // 2 bfloat16 a lane

BATON_INLINE __mmask16 first_lanes(int count) { return static_cast<__mmask16>((1u << count) - 1); }

BATON_INLINE Floats broadcast(float value) { return _mm512_set1_ps(value); }
BATON_INLINE Floats load(const float* values) { return _mm512_loadu_ps(values); }
BATON_INLINE Floats load(const float* values, int count) { return _mm512_maskz_loadu_ps(first_lanes(count), values); }
BATON_INLINE void store(float* out, Floats values) { _mm512_storeu_ps(out, values); }
BATON_INLINE void store(float* out, Floats values, int count) { _mm512_mask_storeu_ps(out, first_lanes(count), values); }
BATON_INLINE Floats load_halves(const uint8_t* halves) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
}

BATON_INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
BATON_INLINE Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
BATON_INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
BATON_INLINE Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
BATON_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
BATON_INLINE Floats lesser(Floats a, Floats b) { return _mm512_min_ps(a, b); }
BATON_INLINE Floats greater(Floats a, Floats b) { return _mm512_max_ps(a, b); }

BATON_INLINE Ints broadcast_int(int32_t value) { return _mm512_set1_epi32(value); }
BATON_INLINE Ints load_ints(const void* values) { return _mm512_loadu_si512(values); }
BATON_INLINE Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
BATON_INLINE Ints sub(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
BATON_INLINE Ints greater_int(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
BATON_INLINE Ints magnitude_bits(Floats values) { return _mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(0x7fffffff)); }
BATON_INLINE int32_t greatest(Ints values) { return _mm512_reduce_max_epi32(values); }
BATON_INLINE int32_t sum(Ints values) { return _mm512_reduce_add_epi32(values); }
BATON_INLINE Floats to_floats(Ints values) { return _mm512_cvtepi32_ps(values); }
BATON_INLINE Floats as_floats(Ints bits) { return _mm512_castsi512_ps(bits); }
BATON_INLINE Ints round_to_ints(Floats values) { return _mm512_cvtps_epi32(values); }
BATON_INLINE Floats power_of_two(Ints exponents) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(exponents, _mm512_set1_epi32(127)), 23));
}

// Lanes 0 + 8, …; then 0 + 4, 0 + 2, 0 + 1.
BATON_INLINE float tree_sum(Floats values) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(values), _mm512_extractf32x8_ps(values, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

BATON_INLINE void store_bytes(uint8_t* out, Ints values) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(values));
}
BATON_INLINE void store_bf16(uint8_t* out, Floats values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh(values));
}

BATON_INLINE UnsignedChannels load_unsigned(const uint8_t* bytes) { return _mm512_loadu_si512(bytes); }
BATON_INLINE SignedChannels load_signed(const uint8_t* bytes) { return _mm512_loadu_si512(bytes); }
BATON_INLINE Nibbles load_nibbles(const uint8_t* bytes) { return _mm512_loadu_si512(bytes); }
BATON_INLINE Pairs load_pairs(const uint8_t* bytes) { return _mm512_loadu_si512(bytes); }
BATON_INLINE Ints broadcast_lane(const uint8_t* bytes) {
  int32_t lane;
  __builtin_memcpy(&lane, bytes, sizeof(lane));
  return _mm512_set1_epi32(lane);
}
BATON_INLINE TokenLevel broadcast_token(const uint8_t* bytes) { return broadcast_lane(bytes); }
BATON_INLINE GroupLevel broadcast_group(const uint8_t* bytes) { return broadcast_lane(bytes); }
BATON_INLINE Pairs broadcast_pairs(const uint8_t* bytes) { return broadcast_lane(bytes); }
BATON_INLINE Nibbles low_nibbles(const uint8_t* bytes) { return _mm512_and_si512(load_ints(bytes), _mm512_set1_epi8(15)); }
BATON_INLINE Nibbles high_nibbles(const uint8_t* bytes) {
  return _mm512_and_si512(_mm512_srli_epi16(load_ints(bytes), 4), _mm512_set1_epi8(15));
}

// Of unsigned and signed bytes, whichever of the two are the channels'.
BATON_INLINE Ints dot(Ints sums, __m512i a, __m512i b) { return _mm512_dpbusd_epi32(sums, a, b); }
BATON_INLINE NibbleSums no_nibble_sums(int32_t origin) { return broadcast_int(origin); }
BATON_INLINE Ints total(NibbleSums sums, int32_t) { return sums; }
BATON_INLINE Floats dot(Floats sums, Pairs a, Pairs b) { return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b); }

BATON_INLINE void prefetch(const uint8_t* bytes) { _mm_prefetch(reinterpret_cast<const char*>(bytes), _MM_HINT_T0); }

}  // namespace baton::avx512
