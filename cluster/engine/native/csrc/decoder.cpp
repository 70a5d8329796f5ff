#include "decoder.h"

#include <cmath>
#include <utility>

namespace baton {
namespace {

void grow(std::vector<float>& buffer, int64_t size) {
  if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(static_cast<size_t>(size));
}

}  // namespace

Decoder::Decoder(const DecoderShape& shape, const KvView& kv, int64_t layer_stride, std::vector<Layer> layers)
    : shape_(shape),
      kv_(kv),
      layer_stride_(layer_stride),
      layers_(std::move(layers)),
      qkv_size_(int64_t{shape.num_heads + 2 * kv.num_kv_heads} * kv.head_dim),
      query_size_(int64_t{shape.num_heads} * kv.head_dim) {}

bool Decoder::run(const Step& step) {
  reserve(step.num_rows);
  KvView kv = kv_;
  for (const Layer& layer : layers_) {
    if (__atomic_load_n(step.interrupt, __ATOMIC_RELAXED)) return false;
    attend(layer, kv, step);
    feed_forward(layer, step);
    kv.base += layer_stride_;
  }
  return true;
}

void Decoder::reserve(int num_rows) {
  grow(qkv_, num_rows * qkv_size_);
  grow(attended_, num_rows * query_size_);
  grow(gate_up_, int64_t{num_rows} * 2 * shape_.intermediate_size);
}

void Decoder::attend(const Layer& layer, const KvView& kv, const Step& step) {
  const int64_t hidden_size = shape_.hidden_size;
  const Source normed{Prologue::kRmsNorm, step.hidden, hidden_size, layer.attention_norm, shape_.norm_eps};
  linear(layer.qkv, normed, step.num_rows, {qkv_.data(), qkv_size_, false});

  // The rotated queries stay where they are in qkv.
  write_kv(kv, {layer.query_norm, layer.key_norm, shape_.norm_eps},
           {qkv_.data(), qkv_size_, step.num_rows, shape_.num_heads, shape_.cos, shape_.sin, step.positions, step.slots, qkv_.data(), qkv_size_});

  const AttentionShape attention{shape_.num_heads, 1.0f / std::sqrt(static_cast<float>(kv.head_dim)), layer.window};
  if (step.num_decodes > 0) {
    decode_attention(kv, attention,
                     {qkv_.data(), qkv_size_, step.decode_tables, step.decode_table_stride, step.context_lens, step.num_decodes, attended_.data()});
  }
  for (const PromptSpan& span : step.prompts) {
    prefill_attention(kv, attention,
                      {qkv_.data() + span.first_row * qkv_size_, qkv_size_, span.num_tokens, span.first_position,
                       step.block_tables + span.table_offset, attended_.data() + span.first_row * query_size_});
  }
  const Source attended{Prologue::kPlain, attended_.data(), query_size_, nullptr, 0.0f};
  linear(layer.output, attended, step.num_rows, {step.hidden, hidden_size, true});
}

void Decoder::feed_forward(const Layer& layer, const Step& step) {
  const int64_t hidden_size = shape_.hidden_size;
  const int64_t gate_up_size = 2 * int64_t{shape_.intermediate_size};
  const Source normed{Prologue::kRmsNorm, step.hidden, hidden_size, layer.mlp_norm, shape_.norm_eps};
  linear(layer.gate_up, normed, step.num_rows, {gate_up_.data(), gate_up_size, false});
  const Source gated{Prologue::kSiluMul, gate_up_.data(), gate_up_size, nullptr, 0.0f};
  linear(layer.down, gated, step.num_rows, {step.hidden, hidden_size, true});
}

}  // namespace baton
