// Everything of attention for one ISA. Include inside its namespace, after the vector operations.

#include "attention_kv.inl"
#include "attention_prefetch.inl"
#include "attention_tile.inl"
#include "attention_softmax.inl"
#include "attention_decode.inl"
#include "attention_prefill.inl"
#include "kv_write.inl"

static void decode(const KvView& kv, const AttentionShape& shape, const DecodeBatch& batch, int heads_per_unit, int first_unit,
                   int end_unit) {
  if (kv.type == KvType::kBf16) return DecodeTask<Bf16>(kv, shape, batch, heads_per_unit).run(first_unit, end_unit);
  DecodeTask<Int8>(kv, shape, batch, heads_per_unit).run(first_unit, end_unit);
}

static void prefill(const KvView& kv, const AttentionShape& shape, const PrefillChunk& chunk, int head, int first_token, int num_tokens) {
  if (kv.type == KvType::kBf16) return PrefillTask<Bf16, VectorProducts>(kv, shape, chunk).run(head, first_token, num_tokens);
  PrefillTask<Int8, VectorProducts>(kv, shape, chunk).run(head, first_token, num_tokens);
}

static void write_tokens(const KvView& kv, const HeadNorms& norms, const KvWriteBatch& batch, int first_token, int end_token) {
  for (int token = first_token; token < end_token; ++token) write_token(kv, norms, batch, token);
}
