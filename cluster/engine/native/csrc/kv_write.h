// What happens to a step's q, k and v before attention: norms, rotary embedding, and K and V into their blocks.
#pragma once

#include <cstdint>

#include "kv_view.h"

namespace baton {

// Weights [head_dim] of the RMS norms over each head of q and k; null where the model has none.
struct HeadNorms {
  const float* query_weight;
  const float* key_weight;
  float eps;
};

struct KvWriteBatch {
  const float* qkv;     // [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
  int64_t qkv_stride;   // floats from one token to the next
  int num_tokens;
  int num_heads;
  const float* cos;  // [any position, head_dim / 2], as is sin
  const float* sin;
  const int64_t* positions;  // [num_tokens]: rows of cos and sin
  const int64_t* slots;      // [num_tokens]: block * block_size + offset, each at most once
  float* queries;            // [num_tokens, num_heads, head_dim]: normed and rotated; may be where they are in qkv
  int64_t query_stride;      // floats from one token to the next
};

// int8: a head's scale is rowmax / 127 in fp16 (`scale_to_fp16`), and its levels are quantized with that fp16 number.
void write_kv(const KvView& kv, const HeadNorms& norms, const KvWriteBatch& batch);

}  // namespace baton
