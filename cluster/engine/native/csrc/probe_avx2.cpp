#include "probe.h"

#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>

namespace baton {
namespace {

#include "probe_chains.inl"

constexpr int kChains = 10;  // with the operands, all 16 registers are in use

void int8_dot(int64_t num_rounds) {
  const __m256i ones = _mm256_set1_epi16(1);
  const __m256i bytes = opaque(_mm256_setzero_si256());
  run_chains<kChains>(num_rounds, _mm256_setzero_si256(), [=](__m256i sum) __attribute__((always_inline)) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(bytes, opaque(bytes)), ones));
  });
}

void float32_fma(int64_t num_rounds) {
  const __m256 values = opaque(_mm256_setzero_ps());
  run_chains<kChains>(num_rounds, _mm256_setzero_ps(),
                      [=](__m256 sum) __attribute__((always_inline)) { return _mm256_fmadd_ps(values, values, sum); });
}

}  // namespace

const Peak kAvx2Peaks[2] = {{"int8_dot", kChains * 64, int8_dot}, {"float32_fma", kChains * 16, float32_fma}};

}  // namespace baton
