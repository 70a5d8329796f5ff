// The vector operations of simd_avx512.h in plain loops. Include inside a namespace of the ISA.

constexpr int kLanes = 8;
constexpr int kMaxRows = 2;
constexpr int max_vectors(int) { return 1; }
constexpr int kPieceBytes = 256;

struct Floats {
  float lane[kLanes];
};
struct Ints {
  int32_t lane[kLanes];
};

template <class Function>
[[gnu::always_inline]] static inline Floats each_float(Function function) {
  Floats result;
  for (int i = 0; i < kLanes; ++i) result.lane[i] = function(i);
  return result;
}
template <class Function>
[[gnu::always_inline]] static inline Ints each_int(Function function) {
  Ints result;
  for (int i = 0; i < kLanes; ++i) result.lane[i] = function(i);
  return result;
}

[[gnu::always_inline]] static inline Floats set1(float x) { return each_float([&](int) { return x; }); }
[[gnu::always_inline]] static inline Ints set1(int32_t x) { return each_int([&](int) { return x; }); }
[[gnu::always_inline]] static inline Floats load(const float* p) { return each_float([&](int i) { return p[i]; }); }
[[gnu::always_inline]] static inline void store(float* p, Floats x) { std::memcpy(p, x.lane, sizeof x.lane); }
[[gnu::always_inline]] static inline Ints load_words(const void* p) {
  Ints result;
  std::memcpy(result.lane, p, sizeof result.lane);
  return result;
}
[[gnu::always_inline]] static inline Floats add(Floats a, Floats b) { return each_float([&](int i) { return a.lane[i] + b.lane[i]; }); }
[[gnu::always_inline]] static inline Floats sub(Floats a, Floats b) { return each_float([&](int i) { return a.lane[i] - b.lane[i]; }); }
[[gnu::always_inline]] static inline Floats mul(Floats a, Floats b) { return each_float([&](int i) { return a.lane[i] * b.lane[i]; }); }
[[gnu::always_inline]] static inline Floats div(Floats a, Floats b) { return each_float([&](int i) { return a.lane[i] / b.lane[i]; }); }
[[gnu::always_inline]] static inline Floats max(Floats a, Floats b) {
  return each_float([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
[[gnu::always_inline]] static inline Floats abs(Floats a) { return each_float([&](int i) { return std::fabs(a.lane[i]); }); }
[[gnu::always_inline]] static inline Floats fma(Floats a, Floats b, Floats c) { return add(mul(a, b), c); }
[[gnu::always_inline]] static inline Floats to_floats(Ints x) { return each_float([&](int i) { return static_cast<float>(x.lane[i]); }); }
[[gnu::always_inline]] static inline float first(Floats x) { return x.lane[0]; }
[[gnu::always_inline]] static inline float reduce_max(Floats x) {
  float result = x.lane[0];
  for (float lane : x.lane) result = lane > result ? lane : result;
  return result;
}
[[gnu::always_inline]] static inline float reduce_add(Floats x) {
  float result = 0;
  for (float lane : x.lane) result += lane;
  return result;
}
[[gnu::always_inline]] static inline Floats load_fp16(const void* p) {
  uint16_t bits[kLanes];
  std::memcpy(bits, p, sizeof bits);
  return each_float([&](int i) { return fp16_to_float(bits[i]); });
}

[[gnu::always_inline]] static inline Floats keep_lanes(Floats x, int from, int to, float other) {
  return each_float([&](int i) { return i >= from && i < to ? x.lane[i] : other; });
}

#include "simd_exp2.inl"

[[gnu::always_inline]] static inline Floats exp2(Floats x) {
  const Floats clamped = max(x, set1(-127.0f));
  const Floats whole = each_float([&](int i) { return std::nearbyint(clamped.lane[i]); });
  const Floats fraction = exp2_fraction(sub(clamped, whole));
  return each_float([&](int i) {
    const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(whole.lane[i]) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return fraction.lane[i] * power;
  });
}

[[gnu::always_inline]] static inline void store_bf16(uint16_t* p, Floats x) {
  for (int i = 0; i < kLanes; ++i) p[i] = float_to_bf16(x.lane[i]);
}
[[gnu::always_inline]] static inline void store_int16(uint16_t* p, Floats x) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint16_t>(static_cast<int32_t>(std::nearbyint(x.lane[i])));
}
[[gnu::always_inline]] static inline void store_int8(int8_t* p, Floats x) {
  for (int i = 0; i < kLanes; ++i) {
    const float level = std::nearbyint(x.lane[i]);
    p[i] = static_cast<int8_t>(level > 127 ? 127 : level < -128 ? -128 : level);
  }
}

[[gnu::always_inline]] static inline Ints load_widened(const uint8_t* p) {
  return each_int([&](int i) {
    const auto low = static_cast<uint16_t>(static_cast<int8_t>(p[2 * i]));
    return static_cast<int32_t>(static_cast<uint32_t>(low) | static_cast<uint32_t>(static_cast<int8_t>(p[2 * i + 1])) << 16);
  });
}
[[gnu::always_inline]] static inline Ints mask_words(Ints x, int32_t mask) { return each_int([&](int i) { return x.lane[i] & mask; }); }

[[gnu::always_inline]] static inline float bf16_at(int32_t word, int half) {
  return bf16_to_float(static_cast<uint16_t>(static_cast<uint32_t>(word) >> 16 * half));
}
[[gnu::always_inline]] static inline Floats dot_bf16(Floats sum, Ints a, Ints b) {
  return each_float([&](int i) {
    const float low = bf16_at(a.lane[i], 0) * bf16_at(b.lane[i], 0);
    return sum.lane[i] + low + bf16_at(a.lane[i], 1) * bf16_at(b.lane[i], 1);
  });
}
[[gnu::always_inline]] static inline Ints dot_bytes(Ints sum, Ints unsigned_bytes, Ints signed_bytes) {
  return each_int([&](int i) {
    int32_t total = sum.lane[i];
    for (int byte = 0; byte < 4; ++byte) {
      total += static_cast<uint8_t>(unsigned_bytes.lane[i] >> 8 * byte) * static_cast<int8_t>(signed_bytes.lane[i] >> 8 * byte);
    }
    return total;
  });
}
[[gnu::always_inline]] static inline Ints dot_int16(Ints sum, Ints a, Ints b) {
  return each_int([&](int i) {
    return sum.lane[i] + static_cast<int16_t>(a.lane[i]) * static_cast<int16_t>(b.lane[i]) + (a.lane[i] >> 16) * (b.lane[i] >> 16);
  });
}
