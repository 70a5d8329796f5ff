// The packing "vnni" of KV blocks: the order in which dot-product instructions consume a head.
//
//   bf16   K [head_dim / 2][block_size][2]         V [block_size / 2][head_dim][2]
//   int8   K [head_dim / 4][block_size][4] uint8   V [block_size / 2][head_dim][2] int8
//          then, for K as for V, one fp16 scale a token: [block_size]
//
// One 32-bit word of K holds neighbouring dimensions of one token, so a vector of words is a vector of tokens and a query needs only
// broadcasts. A word of V holds two neighbouring tokens of one dimension (a half word in int8, widened to 16 bits when loaded).
// int8: value = scale * level; K is stored as level + 128, because the instruction wants one unsigned operand.
// Heads, K and V, layers and blocks lie as `KVLayout` says (cluster/kv_ticket.py).
#pragma once

#include <cstdint>

namespace baton {

enum class KvType { kBf16, kInt8 };

// limits.py says the same.
constexpr int kHeadDimStep = 16;
constexpr int kMaxHeadDim = 256;
constexpr int kMinBlockSize = 16;
constexpr int kMaxBlockSize = 128;
constexpr int kMaxGroupSize = 16;  // query heads that share a KV head

// One layer of all blocks. Strides are in bytes; `base` is the layer's K of block 0.
struct KvView {
  uint8_t* base;
  int64_t block_stride;
  int64_t head_stride;
  int64_t kv_stride;  // from K to V
  int num_kv_heads;
  int head_dim;    // a multiple of kHeadDimStep, at most kMaxHeadDim
  int block_size;  // a power of two from kMinBlockSize to kMaxBlockSize
  KvType type;

  [[gnu::always_inline]] uint8_t* keys(int64_t block, int head) const { return base + block * block_stride + head * head_stride; }
  [[gnu::always_inline]] uint8_t* values(int64_t block, int head) const { return keys(block, head) + kv_stride; }
  [[gnu::always_inline]] int64_t data_bytes() const {  // of one head; its scales follow
    return static_cast<int64_t>(block_size) * head_dim * (type == KvType::kBf16 ? 2 : 1);
  }
};

}  // namespace baton
