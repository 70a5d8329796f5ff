#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")
// GCC 12 warns of its own headers.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <type_traits>

#include "attention_kernels.h"
#include "small_floats.h"

namespace baton {
namespace avx512 {

#include "simd_avx512.h"

constexpr int kScoreRows = kMaxRows;

#include "attention_words.inl"
#include "attention_kernels.inl"

}  // namespace avx512

const AttentionKernels kAvx512Attention = {avx512::decode, avx512::prefill, avx512::write_tokens};

}  // namespace baton
