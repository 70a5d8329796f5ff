// Causal attention over paged KV in the packing "vnni" (kv_view.h).
//
// A row is one query head of one token. Its arithmetic is a function of its own position and of the KV it sees: keys are taken in tiles
// at fixed absolute positions, every score and every output element has one chain of operations, and what lies outside a row's range
// adds exact zeros. So its bits depend neither on the batch, nor on chunks, blocks or threads. KV that a row sees must be finite.
#pragma once

#include <cstdint>

#include "kv_view.h"

namespace baton {

struct AttentionShape {
  int num_heads;  // query heads: at most kMaxGroupSize for each KV head
  float scale;    // of the scores
  int window;     // a query sees itself and the window - 1 tokens before it; INT_MAX for all
};

// One query token for each of `num_seqs` sequences, whose K and V are in the blocks already.
struct DecodeBatch {
  const float* queries;         // [num_seqs, num_heads, head_dim], rotated
  int64_t query_stride;         // floats from one token to the next
  const int32_t* block_tables;  // [num_seqs, table_stride]
  int64_t table_stride;
  const int32_t* context_lens;  // tokens in the cache, the query's own included; at least 1
  int num_seqs;
  float* out;  // [num_seqs, num_heads, head_dim], contiguous
};

// Neighbouring tokens of one sequence; K and V of all tokens up to the last of them are in the blocks already.
struct PrefillChunk {
  const float* queries;  // [num_tokens, num_heads, head_dim], rotated
  int64_t query_stride;  // floats from one token to the next
  int num_tokens;
  int first_position;
  const int32_t* block_table;
  float* out;  // [num_tokens, num_heads, head_dim], contiguous
};

void decode_attention(const KvView& kv, const AttentionShape& shape, const DecodeBatch& batch);
void prefill_attention(const KvView& kv, const AttentionShape& shape, const PrefillChunk& chunk);

}  // namespace baton
