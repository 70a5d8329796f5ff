#include "probe.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")
#include <immintrin.h>

namespace baton {
namespace {

#include "probe_chains.inl"

constexpr int kChains = 12;
constexpr int64_t kStep = 256;

void int8_dot(int64_t num_rounds) {
  const __m512i bytes = opaque(_mm512_setzero_si512());
  run_chains<kChains>(num_rounds, _mm512_setzero_si512(),
                      [=](__m512i sum) __attribute__((always_inline)) { return _mm512_dpbusd_epi32(sum, bytes, bytes); });
}

void bf16_dot(int64_t num_rounds) {
  const __m512bh values = reinterpret_cast<__m512bh>(opaque(_mm512_setzero_si512()));
  run_chains<kChains>(num_rounds, _mm512_setzero_ps(),
                      [=](__m512 sum) __attribute__((always_inline)) { return _mm512_dpbf16_ps(sum, values, values); });
}

void float32_fma(int64_t num_rounds) {
  const __m512 values = opaque(_mm512_setzero_ps());
  run_chains<kChains>(num_rounds, _mm512_setzero_ps(),
                      [=](__m512 sum) __attribute__((always_inline)) { return _mm512_fmadd_ps(values, values, sum); });
}

}  // namespace

const Peak kAvx512Peaks[3] = {{"int8_dot", kChains * 128, int8_dot}, {"bf16_dot", kChains * 64, bf16_dot}, {"float32_fma", kChains * 32, float32_fma}};

uint64_t read_avx512(const uint8_t* data, int64_t num_bytes) {
  constexpr int64_t kAhead = 4096;  // prefetched into the second level, past the end at last, which harms nothing
  __m512i sums[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
  for (int64_t i = 0; i < num_bytes; i += kStep) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < 4; ++j) {
      _mm_prefetch(reinterpret_cast<const char*>(data + i + kAhead + 64 * j), _MM_HINT_T1);
      sums[j] = _mm512_add_epi64(sums[j], _mm512_loadu_si512(data + i + 64 * j));
    }
  }
  const __m512i sum = _mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]), _mm512_add_epi64(sums[2], sums[3]));
  return static_cast<uint64_t>(_mm512_reduce_add_epi64(sum));
}

}  // namespace baton
