#include "attention.h"

#include <algorithm>

#include "attention_kernels.h"
#include "isa.h"
#include "thread_pool.h"

namespace baton {
namespace {

constexpr int64_t kCachedBytes = 256 << 10;  // K and V of a tile while the next one is prefetched: both stay in the L2 cache
constexpr int kTasksPerThread = 4;

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Neighbouring KV heads of a block are neighbours in memory, so as many as possible are read together.
int decode_heads_per_unit(const KvView& kv, int group_size, int num_seqs, int num_threads) {
  const int64_t tile_bytes = 2 * kv.head_stride * (kTileTokens / kv.block_size);  // of one head
  const int in_cache = static_cast<int>(kCachedBytes / tile_bytes);
  const int for_all_threads = ceil_div(kv.num_kv_heads, ceil_div(num_threads, num_seqs));
  return std::max(1, std::min({in_cache, kMaxStateRows / group_size, for_all_threads}));
}

}  // namespace

const AttentionKernels& attention_kernels() {
  switch (current_isa()) {
    case Isa::kAmx:
      return kAmxAttention;
    case Isa::kAvx512:
      return kAvx512Attention;
    case Isa::kAvx2:
      return kAvx2Attention;
    case Isa::kPortable:
      break;
  }
  return kPortableAttention;
}

void decode_attention(const KvView& kv, const AttentionShape& shape, const DecodeBatch& batch) {
  Pool& pool = Pool::instance();
  const AttentionKernels& kernels = attention_kernels();
  const int heads_per_unit = decode_heads_per_unit(kv, shape.num_heads / kv.num_kv_heads, batch.num_seqs, pool.num_threads());
  const int64_t num_units = int64_t{batch.num_seqs} * ceil_div(kv.num_kv_heads, heads_per_unit);
  // A task prefetches across its units, so it is a run of them.
  const int64_t num_tasks = pool.num_threads() == 1 ? 1 : std::min<int64_t>(num_units, kTasksPerThread * pool.num_threads());
  pool.parallel(num_tasks, [&](int64_t task) {
    kernels.decode(kv, shape, batch, heads_per_unit, static_cast<int>(num_units * task / num_tasks),
                   static_cast<int>(num_units * (task + 1) / num_tasks));
  });
}

void prefill_attention(const KvView& kv, const AttentionShape& shape, const PrefillChunk& chunk) {
  const AttentionKernels& kernels = attention_kernels();
  const int tokens_per_task = kMaxStateRows / (shape.num_heads / kv.num_kv_heads);
  const int64_t num_pieces = ceil_div(chunk.num_tokens, tokens_per_task);
  Pool::instance().parallel(num_pieces * kv.num_kv_heads, [&](int64_t task) {
    // The last queries see the most keys: they go first.
    const int first_token = static_cast<int>(num_pieces - 1 - task / kv.num_kv_heads) * tokens_per_task;
    const int num_tokens = std::min(tokens_per_task, chunk.num_tokens - first_token);
    kernels.prefill(kv, shape, chunk, static_cast<int>(task % kv.num_kv_heads), first_token, num_tokens);
  });
}

void write_kv(const KvView& kv, const HeadNorms& norms, const KvWriteBatch& batch) {
  Pool& pool = Pool::instance();
  const AttentionKernels& kernels = attention_kernels();
  const int64_t num_tokens = batch.num_tokens;
  const int64_t num_tasks = std::min<int64_t>(num_tokens, pool.num_threads());
  pool.parallel(num_tasks, [&](int64_t task) {
    const auto first_token = static_cast<int>(num_tokens * task / num_tasks);
    kernels.write_kv(kv, norms, batch, first_token, static_cast<int>(num_tokens * (task + 1) / num_tasks));
  });
}

}  // namespace baton
