#pragma GCC target("avx2,fma,f16c")

#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <type_traits>

#include "attention_kernels.h"
#include "small_floats.h"

namespace baton {
namespace avx2 {

#include "simd_avx2.h"

constexpr int kScoreRows = kMaxRows;

#include "attention_words_avx2.inl"
#include "attention_kernels.inl"

}  // namespace avx2

const AttentionKernels kAvx2Attention = {avx2::decode, avx2::prefill, avx2::write_tokens};

}  // namespace baton
