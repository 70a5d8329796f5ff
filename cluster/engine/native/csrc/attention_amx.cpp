#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c,amx-tile,amx-bf16,amx-int8")
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
namespace amx {

#include "simd_avx512.h"

constexpr int kScoreRows = 32;

#include "attention_words.inl"
#include "attention_kv.inl"
#include "attention_amx.inl"
#include "attention_softmax.inl"
#include "attention_prefill.inl"

static void prefill(const KvView& kv, const AttentionShape& shape, const PrefillChunk& chunk, int head, int first_token, int num_tokens) {
  if (!fits_tiles(kv)) return kAvx512Attention.prefill(kv, shape, chunk, head, first_token, num_tokens);
  const TileConfig config;
  if (kv.type == KvType::kBf16) return PrefillTask<AmxBf16, AmxProducts>(kv, shape, chunk).run(head, first_token, num_tokens);
  PrefillTask<AmxInt8, AmxProducts>(kv, shape, chunk).run(head, first_token, num_tokens);
}

// Decode is bound by memory, and has too few rows for tiles.
static void decode(const KvView& kv, const AttentionShape& shape, const DecodeBatch& batch, int heads_per_unit, int first_unit,
                   int end_unit) {
  kAvx512Attention.decode(kv, shape, batch, heads_per_unit, first_unit, end_unit);
}

static void write_tokens(const KvView& kv, const HeadNorms& norms, const KvWriteBatch& batch, int first_token, int end_token) {
  kAvx512Attention.write_kv(kv, norms, batch, first_token, end_token);
}

}  // namespace amx

const AttentionKernels kAmxAttention = {amx::decode, amx::prefill, amx::write_tokens};

}  // namespace baton
