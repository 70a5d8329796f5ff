// The layers of a decoder over one step's rows: one call computes them all.
//
//   hidden ─► norm, qkv ─► norms of q and k, rotary embedding, K and V to their blocks ─► attention ─► output ─► + hidden
//          ─► norm, gate and up ─► silu · up, down ─► + hidden
//
// The bits of a row depend on that row and the KV it sees alone: every part keeps this promise by itself.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"
#include "kv_write.h"
#include "linear.h"

namespace baton {

struct Layer {
  const float* attention_norm;  // [hidden_size]
  Weight qkv;                   // outputs: heads of q, of k, of v
  const float* query_norm;      // [head_dim], or null
  const float* key_norm;        // [head_dim], or null
  int window;                   // as AttentionShape's
  Weight output;
  const float* mlp_norm;  // [hidden_size]
  Weight gate_up;         // outputs: gates, then ups
  Weight down;
};

// Rows [first_row, first_row + num_tokens) are neighbouring tokens of one sequence's prompt.
struct PromptSpan {
  int first_row;
  int num_tokens;
  int first_position;
  int64_t table_offset;  // into Step::block_tables
};

struct Step {
  float* hidden;  // [num_rows, hidden_size]: embeddings in, the last layer's output out
  int num_rows;
  const int64_t* positions;  // [num_rows]
  const int64_t* slots;      // [num_rows]: block * block_size + offset
  // The first num_decodes rows are one output token of a sequence each; the others belong to prompts. Which kernel a token gets is a
  // property of its request, never of the batch.
  int num_decodes;
  const int32_t* decode_tables;  // [num_decodes, decode_table_stride]
  int64_t decode_table_stride;
  const int32_t* context_lens;  // [num_decodes]
  std::vector<PromptSpan> prompts;
  const int32_t* block_tables;  // of all prompts, one after the other
  const uint8_t* interrupt;     // another thread may set it to 1
};

struct DecoderShape {
  int hidden_size;
  int intermediate_size;
  int num_heads;
  float norm_eps;
  const float* cos;  // [max_positions, head_dim / 2], as is sin
  const float* sin;
};

class Decoder {
 public:
  // `kv` is the first layer's view of the pool; the next layer's begins `layer_stride` bytes after it.
  Decoder(const DecoderShape& shape, const KvView& kv, int64_t layer_stride, std::vector<Layer> layers);

  // Not on two threads at once. False when it was interrupted before the last layer.
  bool run(const Step& step);

 private:
  void reserve(int num_rows);
  void attend(const Layer& layer, const KvView& kv, const Step& step);
  void feed_forward(const Layer& layer, const Step& step);

  DecoderShape shape_;
  KvView kv_;
  int64_t layer_stride_;
  std::vector<Layer> layers_;
  int64_t qkv_size_;
  int64_t query_size_;
  // Reused from step to step.
  std::vector<float> qkv_;
  std::vector<float> attended_;
  std::vector<float> gate_up_;
};

}  // namespace baton
