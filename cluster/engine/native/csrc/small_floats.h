// bfloat16 and fp16 to and from float32, one at a time.
#pragma once

#include <cstdint>
#include <cstring>

namespace baton {

[[gnu::always_inline]] inline float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

[[gnu::always_inline]] inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

[[gnu::always_inline]] inline float bf16_to_float(uint16_t x) { return bits_to_float(static_cast<uint32_t>(x) << 16); }

// To nearest, ties to even.
[[gnu::always_inline]] inline uint16_t float_to_bf16(float x) {
  const uint32_t bits = float_to_bits(x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>(x == x ? rounded : 0x7fc0);
}

[[gnu::always_inline]] inline float fp16_to_float(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16;
  const uint32_t magnitude = x & 0x7fff;
  if (magnitude >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // 2^112 moves the exponent from fp16's bias to float32's, for subnormal numbers too.
  return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 13) * 0x1p112f));
}

// For scales, x >= 0: towards zero, so that quantizing with the result errs by at most half of x; up where fp16 has few bits left, so
// that no level is far beyond the largest; at most 65504.
[[gnu::always_inline]] inline uint16_t scale_to_fp16(float x) {
  if (!(x < 65504.0f)) return 0x7bff;
  if (x >= 0x1p-14f) return static_cast<uint16_t>((float_to_bits(x) >> 13) - (112 << 10));
  const float steps = x * 0x1p24f;  // exact
  const auto whole = static_cast<uint16_t>(steps);
  return static_cast<uint16_t>(whole + (static_cast<float>(whole) < steps));
}

}  // namespace baton
