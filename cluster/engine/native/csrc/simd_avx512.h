// The vector operations that kernels are written in, on AVX-512 with VNNI and BF16. Include inside a namespace of the ISA.

constexpr int kLanes = 16;
constexpr int kMaxRows = 6;
constexpr int max_vectors(int) { return 4; }  // beside so many rows: 24 sums, 4 loads, 1 broadcast
constexpr int kPieceBytes = 256;  // prefetched at a time

using Floats = __m512;
using Ints = __m512i;

[[gnu::always_inline]] static inline Floats set1(float x) { return _mm512_set1_ps(x); }
[[gnu::always_inline]] static inline Ints set1(int32_t x) { return _mm512_set1_epi32(x); }
[[gnu::always_inline]] static inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
[[gnu::always_inline]] static inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
[[gnu::always_inline]] static inline Ints load_words(const void* p) { return _mm512_loadu_si512(p); }
[[gnu::always_inline]] static inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
[[gnu::always_inline]] static inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
[[gnu::always_inline]] static inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
[[gnu::always_inline]] static inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
[[gnu::always_inline]] static inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
[[gnu::always_inline]] static inline Floats abs(Floats a) { return _mm512_abs_ps(a); }
[[gnu::always_inline]] static inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
[[gnu::always_inline]] static inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
[[gnu::always_inline]] static inline float reduce_max(Floats x) { return _mm512_reduce_max_ps(x); }
[[gnu::always_inline]] static inline float reduce_add(Floats x) { return _mm512_reduce_add_ps(x); }
[[gnu::always_inline]] static inline float first(Floats x) { return _mm512_cvtss_f32(x); }
[[gnu::always_inline]] static inline Floats load_fp16(const void* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}

// Keeps the lanes from … to - 1, replaces the others whatever they hold.
[[gnu::always_inline]] static inline Floats keep_lanes(Floats x, int from, int to, float other) {
  const Ints lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 is_kept = _mm512_cmpge_epi32_mask(lanes, set1(from)) & _mm512_cmplt_epi32_mask(lanes, set1(to));
  return _mm512_mask_mov_ps(set1(other), is_kept, x);
}

#include "simd_exp2.inl"

// 2^x for x <= 0, within 2e-7; 0 below 2^-126: making subnormal numbers takes this instruction 25 times longer.
[[gnu::always_inline]] static inline Floats exp2(Floats x) {
  const __mmask16 is_normal = _mm512_cmp_ps_mask(x, set1(-126.0f), _CMP_GE_OQ);
  const Floats whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm512_maskz_scalef_ps(is_normal, exp2_fraction(sub(x, whole)), whole);
}

[[gnu::always_inline]] static inline void store_bf16(uint16_t* p, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}
[[gnu::always_inline]] static inline void store_int16(uint16_t* p, Floats x) {  // |x| < 2^15, rounded to nearest
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x)));
}
[[gnu::always_inline]] static inline void store_int8(int8_t* p, Floats x) {  // saturates, rounded to nearest
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}

// 2 * kLanes signed bytes as 16-bit numbers.
[[gnu::always_inline]] static inline Ints load_widened(const uint8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
[[gnu::always_inline]] static inline Ints mask_words(Ints x, int32_t mask) { return _mm512_and_si512(x, set1(mask)); }

// In each lane: sum + the products of the lane's 2 bfloat16, 4 bytes, or 2 16-bit numbers.
[[gnu::always_inline]] static inline Floats dot_bf16(Floats sum, Ints a, Ints b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
[[gnu::always_inline]] static inline Ints dot_bytes(Ints sum, Ints unsigned_bytes, Ints signed_bytes) {
  return _mm512_dpbusd_epi32(sum, unsigned_bytes, signed_bytes);
}
[[gnu::always_inline]] static inline Ints dot_int16(Ints sum, Ints a, Ints b) { return _mm512_dpwssd_epi32(sum, a, b); }
