#include <cmath>
#include <cstring>
#include <memory>
#include <type_traits>

#include "attention_kernels.h"
#include "small_floats.h"

namespace baton {
namespace portable {

#include "simd_portable.h"

constexpr int kScoreRows = kMaxRows;

#include "attention_words.inl"
#include "attention_kernels.inl"

}  // namespace portable

const AttentionKernels kPortableAttention = {portable::decode, portable::prefill, portable::write_tokens};

}  // namespace baton
