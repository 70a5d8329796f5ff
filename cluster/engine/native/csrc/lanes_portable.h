// Vectors of 16 lanes of 32 bits as plain loops: for any machine, to be right; see `lanes_avx512.h`.

namespace baton::portable {

#define BATON_INLINE inline

constexpr int kLanes = 16;
constexpr int kTileRows = 1;
constexpr int tile_vectors(int) { return 1; }
constexpr int64_t kPrefetchBytes = 4096;
constexpr int64_t kGroupsAhead = 8;
constexpr bool kSumsHoldZeroPoint = true;

struct Floats {
  float lane[kLanes];
};
struct Ints {
  int32_t lane[kLanes];
};
struct Unsigned {
  uint8_t byte[4 * kLanes];
};
struct Signed {
  int8_t byte[4 * kLanes];
};
using UnsignedChannels = Unsigned;
using SignedChannels = Signed;
using Nibbles = Unsigned;
using TokenLevel = Unsigned;
using GroupLevel = Signed;
using NibbleSums = Ints;
struct Pairs {
  Floats even, odd;
};

template <class Fn>
Floats each_float(Fn&& fn) {
  Floats result;
  for (int i = 0; i < kLanes; ++i) result.lane[i] = fn(i);
  return result;
}
template <class Fn>
Ints each_int(Fn&& fn) {
  Ints result;
  for (int i = 0; i < kLanes; ++i) result.lane[i] = fn(i);
  return result;
}
template <class To, class From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

inline float widen_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return bit_cast<float>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude >= 0x0400) return bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  return sign ? -subnormal : subnormal;
}

inline Floats broadcast(float value) {
  return each_float([&](int) { return value; });
}
inline Floats load(const float* values) {
  return each_float([&](int i) { return values[i]; });
}
inline Floats load(const float* values, int count) {
  return each_float([&](int i) { return i < count ? values[i] : 0.0f; });
}
inline void store(float* out, Floats values, int count = kLanes) {
  for (int i = 0; i < count; ++i) out[i] = values.lane[i];
}
inline Floats load_halves(const uint8_t* halves) {
  return each_float([&](int i) {
    uint16_t half;
    __builtin_memcpy(&half, halves + 2 * i, sizeof(half));
    return widen_half(half);
  });
}

inline Floats add(Floats a, Floats b) {
  return each_float([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline Floats sub(Floats a, Floats b) {
  return each_float([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline Floats mul(Floats a, Floats b) {
  return each_float([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline Floats div(Floats a, Floats b) {
  return each_float([&](int i) { return a.lane[i] / b.lane[i]; });
}
inline Floats fma(Floats a, Floats b, Floats c) {
  return each_float([&](int i) { return __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]); });
}
// As the vector instructions: the second if either is a NaN.
inline Floats lesser(Floats a, Floats b) {
  return each_float([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Floats greater(Floats a, Floats b) {
  return each_float([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}

inline Ints broadcast_int(int32_t value) {
  return each_int([&](int) { return value; });
}
inline Ints load_ints(const void* values) {
  Ints result;
  __builtin_memcpy(&result, values, sizeof(result));
  return result;
}
inline Ints add(Ints a, Ints b) {
  return each_int([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline Ints sub(Ints a, Ints b) {
  return each_int([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline Ints greater_int(Ints a, Ints b) {
  return each_int([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Ints magnitude_bits(Floats values) {
  return each_int([&](int i) { return bit_cast<int32_t>(values.lane[i]) & 0x7fffffff; });
}
inline int32_t greatest(Ints values) {
  int32_t result = values.lane[0];
  for (const int32_t lane : values.lane) result = lane > result ? lane : result;
  return result;
}
inline int32_t sum(Ints values) {
  int32_t result = 0;
  for (const int32_t lane : values.lane) result += lane;
  return result;
}
inline Floats to_floats(Ints values) {
  return each_float([&](int i) { return static_cast<float>(values.lane[i]); });
}
inline Floats as_floats(Ints bits) {
  return each_float([&](int i) { return bit_cast<float>(bits.lane[i]); });
}
// As the vector instructions: the least integer for what no integer can hold.
inline Ints round_to_ints(Floats values) {
  return each_int([&](int i) {
    const float value = values.lane[i];
    return value > -0x1p31f && value < 0x1p31f ? static_cast<int32_t>(__builtin_nearbyintf(value)) : INT32_MIN;
  });
}
inline Floats power_of_two(Ints exponents) {
  return each_float([&](int i) { return bit_cast<float>(static_cast<uint32_t>(exponents.lane[i] + 127) << 23); });
}
inline float tree_sum(Floats values) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) values.lane[i] += values.lane[i + width];
  }
  return values.lane[0];
}

inline void store_bytes(uint8_t* out, Ints values) {
  for (int i = 0; i < kLanes; ++i) out[i] = static_cast<uint8_t>(values.lane[i]);
}
inline void store_bf16(uint8_t* out, Floats values) {
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t bits = bit_cast<uint32_t>(values.lane[i]);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const uint16_t result = static_cast<uint16_t>(values.lane[i] == values.lane[i] ? rounded : 0x7fc0);
    __builtin_memcpy(out + 2 * i, &result, sizeof(result));
  }
}

template <class Bytes>
Bytes load_as(const uint8_t* bytes) {
  Bytes result;
  __builtin_memcpy(&result, bytes, sizeof(result));
  return result;
}
template <class Bytes>
Bytes broadcast_as(const uint8_t* bytes) {
  Bytes result;
  for (int i = 0; i < kLanes; ++i) __builtin_memcpy(result.byte + 4 * i, bytes, 4);
  return result;
}
inline Unsigned load_unsigned(const uint8_t* bytes) { return load_as<Unsigned>(bytes); }
inline Signed load_signed(const uint8_t* bytes) { return load_as<Signed>(bytes); }
inline Nibbles load_nibbles(const uint8_t* bytes) { return load_as<Nibbles>(bytes); }
inline Unsigned broadcast_token(const uint8_t* bytes) { return broadcast_as<Unsigned>(bytes); }
inline Signed broadcast_group(const uint8_t* bytes) { return broadcast_as<Signed>(bytes); }
inline Nibbles low_nibbles(const uint8_t* bytes) {
  Unsigned result = load_unsigned(bytes);
  for (uint8_t& byte : result.byte) byte &= 15;
  return result;
}
inline Nibbles high_nibbles(const uint8_t* bytes) {
  Unsigned result = load_unsigned(bytes);
  for (uint8_t& byte : result.byte) byte >>= 4;
  return result;
}
inline Pairs widen_pairs(Ints lanes) {
  return {each_float([&](int i) { return bit_cast<float>(static_cast<uint32_t>(lanes.lane[i]) << 16); }),
          each_float([&](int i) { return bit_cast<float>(static_cast<uint32_t>(lanes.lane[i]) & 0xffff0000); })};
}
inline Pairs load_pairs(const uint8_t* bytes) { return widen_pairs(load_ints(bytes)); }
inline Pairs broadcast_pairs(const uint8_t* bytes) {
  int32_t lane;
  __builtin_memcpy(&lane, bytes, sizeof(lane));
  return widen_pairs(broadcast_int(lane));
}

inline Ints dot(Ints sums, Unsigned a, Signed b) {
  for (int i = 0; i < 4 * kLanes; ++i) sums.lane[i / 4] += a.byte[i] * b.byte[i];
  return sums;
}
inline NibbleSums no_nibble_sums(int32_t origin) { return broadcast_int(origin); }
inline Ints total(NibbleSums sums, int32_t) { return sums; }
inline Floats dot(Floats sums, Pairs a, Pairs b) { return fma(a.even, b.even, fma(a.odd, b.odd, sums)); }

inline void prefetch(const uint8_t*) {}

}  // namespace baton::portable
