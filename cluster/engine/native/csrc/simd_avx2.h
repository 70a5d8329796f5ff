// The vector operations of simd_avx512.h on AVX2, FMA and F16C. Include inside a namespace of the ISA.

constexpr int kLanes = 8;
constexpr int kMaxRows = 5;
constexpr int max_vectors(int rows) { return rows <= 2 ? 4 : rows == 3 ? 3 : 2; }  // at most 10 sums: the rest fits 16 registers
constexpr int kPieceBytes = 64;  // no more is prefetched than is loaded: misses queue up before loads that would hit

using Floats = __m256;
using Ints = __m256i;

[[gnu::always_inline]] static inline Floats set1(float x) { return _mm256_set1_ps(x); }
[[gnu::always_inline]] static inline Ints set1(int32_t x) { return _mm256_set1_epi32(x); }
[[gnu::always_inline]] static inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
[[gnu::always_inline]] static inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
[[gnu::always_inline]] static inline Ints load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
[[gnu::always_inline]] static inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
[[gnu::always_inline]] static inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
[[gnu::always_inline]] static inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
[[gnu::always_inline]] static inline Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
[[gnu::always_inline]] static inline Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
[[gnu::always_inline]] static inline Floats abs(Floats a) { return _mm256_andnot_ps(set1(-0.0f), a); }
[[gnu::always_inline]] static inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
[[gnu::always_inline]] static inline Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
[[gnu::always_inline]] static inline float first(Floats x) { return _mm256_cvtss_f32(x); }
[[gnu::always_inline]] static inline Floats load_fp16(const void* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}

[[gnu::always_inline]] static inline float reduce_max(Floats x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
[[gnu::always_inline]] static inline float reduce_add(Floats x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

[[gnu::always_inline]] static inline Floats keep_lanes(Floats x, int from, int to, float other) {
  const Ints lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const Ints is_kept = _mm256_andnot_si256(_mm256_cmpgt_epi32(set1(from), lanes), _mm256_cmpgt_epi32(set1(to), lanes));
  return _mm256_blendv_ps(set1(other), x, _mm256_castsi256_ps(is_kept));
}

#include "simd_exp2.inl"

[[gnu::always_inline]] static inline Floats exp2(Floats x) {
  x = max(x, set1(-127.0f));
  const Floats whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Ints exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), set1(127)), 23);  // 0 for -127
  return mul(exp2_fraction(sub(x, whole)), _mm256_castsi256_ps(exponent));
}

[[gnu::always_inline]] static inline void store_bf16(uint16_t* p, Floats x) {
  const Ints bits = _mm256_castps_si256(x);
  const Ints is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), set1(1));
  const Ints rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(is_odd, set1(0x7fff))), 16);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)));
}
[[gnu::always_inline]] static inline void store_int16(uint16_t* p, Floats x) {
  const Ints numbers = _mm256_cvtps_epi32(x);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi32(_mm256_castsi256_si128(numbers), _mm256_extracti128_si256(numbers, 1)));
}
[[gnu::always_inline]] static inline void store_int8(int8_t* p, Floats x) {
  const Ints numbers = _mm256_cvtps_epi32(x);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(numbers), _mm256_extracti128_si256(numbers, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

[[gnu::always_inline]] static inline Ints load_widened(const uint8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
[[gnu::always_inline]] static inline Ints mask_words(Ints x, int32_t mask) { return _mm256_and_si256(x, set1(mask)); }

[[gnu::always_inline]] static inline Floats low_bf16(Ints x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
[[gnu::always_inline]] static inline Floats high_bf16(Ints x) {
  return _mm256_castsi256_ps(mask_words(x, static_cast<int32_t>(0xffff0000)));
}
[[gnu::always_inline]] static inline Ints dot_int16(Ints sum, Ints a, Ints b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
