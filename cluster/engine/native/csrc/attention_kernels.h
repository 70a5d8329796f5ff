// What one instruction set implements of attention.h and kv_write.h, on the calling thread; plain structs only, so that no inline
// function is compiled for several sets.
#pragma once

#include "attention.h"
#include "kv_write.h"

namespace baton {

constexpr float kLog2E = 1.44269504f;

constexpr int kTileTokens = 256;   // keys of one step of the online softmax, at fixed absolute positions
constexpr int kMaxStateRows = 96;  // rows that one thread carries from tile to tile

struct AttentionKernels {
  // A unit is `heads_per_unit` KV heads of one sequence (at the end of a sequence fewer); units first_unit … end_unit - 1 in the order
  // [sequence][heads]. heads_per_unit * group size is at most kMaxStateRows.
  void (*decode)(const KvView&, const AttentionShape&, const DecodeBatch&, int heads_per_unit, int first_unit, int end_unit);
  // `num_tokens` queries of the chunk from `first_token` on, and one KV head. num_tokens * group size is at most kMaxStateRows.
  void (*prefill)(const KvView&, const AttentionShape&, const PrefillChunk&, int head, int first_token, int num_tokens);
  // Tokens first_token … end_token - 1.
  void (*write_kv)(const KvView&, const HeadNorms&, const KvWriteBatch&, int first_token, int end_token);
};

extern const AttentionKernels kPortableAttention;
extern const AttentionKernels kAvx2Attention;
extern const AttentionKernels kAvx512Attention;
extern const AttentionKernels kAmxAttention;

const AttentionKernels& attention_kernels();  // those of current_isa()

}  // namespace baton
