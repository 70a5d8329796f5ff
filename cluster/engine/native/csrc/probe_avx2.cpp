#include "probe.h"

#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>

namespace baton {
namespace {

#include "probe_chains.inl"

constexpr int64_t kStep = 256;
constexpr int kChains = 10;  // with the operands, all 16 registers are in use

// Made anew each time: the compiler would keep them, for the operands are always the same.
[[gnu::always_inline]] inline __m256i products(__m256i a, __m256i b) {
  __m256i result;
  asm volatile("vpmaddubsw %2, %1, %0" : "=x"(result) : "x"(a), "x"(b));
  return result;
}

// Products with 4 bits: several of them can be summed in 16.
void int4_dot(int64_t num_rounds) {
  const __m256i bytes = opaque(_mm256_setzero_si256());
  run_chains<kChains>(num_rounds, _mm256_setzero_si256(),
                      [=](__m256i sum) __attribute__((always_inline)) { return _mm256_add_epi16(sum, products(bytes, bytes)); });
}

void int8_dot(int64_t num_rounds) {
  const __m256i ones = _mm256_set1_epi16(1);
  const __m256i bytes = opaque(_mm256_setzero_si256());
  run_chains<kChains>(num_rounds, _mm256_setzero_si256(), [=](__m256i sum) __attribute__((always_inline)) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(products(bytes, bytes), ones));
  });
}

void float32_fma(int64_t num_rounds) {
  const __m256 values = opaque(_mm256_setzero_ps());
  run_chains<kChains>(num_rounds, _mm256_setzero_ps(),
                      [=](__m256 sum) __attribute__((always_inline)) { return _mm256_fmadd_ps(values, values, sum); });
}

}  // namespace

const Peak kAvx2Peaks[3] = {{"int4_dot", kChains * 64, int4_dot}, {"int8_dot", kChains * 64, int8_dot}, {"float32_fma", kChains * 16, float32_fma}};

uint64_t read_avx2(const uint8_t* data, int64_t num_bytes) {
  constexpr int64_t kAhead = 4096;  // prefetched, past the end at last, which harms nothing
  __m256i sums[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int64_t i = 0; i < num_bytes; i += kStep) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < 4; ++j) {
      const uint8_t* line = data + i + 64 * j;
      _mm_prefetch(reinterpret_cast<const char*>(line + kAhead), _MM_HINT_T0);
      sums[j] = _mm256_add_epi64(sums[j], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line)));
      sums[j] = _mm256_add_epi64(sums[j], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + 32)));
    }
  }
  alignas(32) uint64_t words[4];
  const __m256i sum = _mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]), _mm256_add_epi64(sums[2], sums[3]));
  _mm256_store_si256(reinterpret_cast<__m256i*>(words), sum);
  return words[0] + words[1] + words[2] + words[3];
}

}  // namespace baton
