// See kv_write.h. Include inside a namespace of the ISA, after the vector operations.

static void rms_norm(float* head, const float* weight, float eps, int head_dim) {
  Floats squares = set1(0.0f);
  for (int dim = 0; dim < head_dim; dim += kLanes) squares = add(squares, mul(load(head + dim), load(head + dim)));
  const Floats scale = set1(1.0f / std::sqrt(reduce_add(squares) / static_cast<float>(head_dim) + eps));
  for (int dim = 0; dim < head_dim; dim += kLanes) store(head + dim, mul(mul(load(head + dim), scale), load(weight + dim)));
}

// Separate products and sums, each rounded, as `Operations.rotate` does.
static void rotate(float* head, const float* cos, const float* sin, int head_dim) {
  const int half = head_dim / 2;
  for (int dim = 0; dim < half; dim += 8) {
    float first[8], second[8];
    for (int i = 0; i < 8; ++i) {
      const float a = head[dim + i], b = head[half + dim + i];
      first[i] = a * cos[dim + i] - b * sin[dim + i];
      second[i] = b * cos[dim + i] + a * sin[dim + i];
    }
    std::memcpy(head + dim, first, sizeof first);
    std::memcpy(head + half + dim, second, sizeof second);
  }
}

static void write_bf16(const float* head, uint8_t* out, int64_t dim_stride, bool is_key, int head_dim) {
  uint16_t rounded[kMaxHeadDim];
  for (int dim = 0; dim < head_dim; ++dim) rounded[dim] = float_to_bf16(head[dim]);
  if (is_key) {
    for (int dim = 0; dim < head_dim; dim += 2) std::memcpy(out + dim / 2 * dim_stride, rounded + dim, 4);
  } else {
    for (int dim = 0; dim < head_dim; ++dim) std::memcpy(out + dim * dim_stride, rounded + dim, 2);
  }
}

static void write_int8(const float* head, uint8_t* out, uint8_t* scale_out, int64_t dim_stride, bool is_key, int head_dim) {
  Floats largest = set1(0.0f);
  for (int dim = 0; dim < head_dim; dim += kLanes) largest = max(largest, abs(load(head + dim)));
  const uint16_t scale = scale_to_fp16(reduce_max(largest) / 127.0f);
  std::memcpy(scale_out, &scale, sizeof scale);
  const Floats divisor = set1(scale == 0 ? 1.0f : fp16_to_float(scale));
  int8_t levels[kMaxHeadDim];
  for (int dim = 0; dim < head_dim; dim += kLanes) {
    const Floats level = div(load(head + dim), divisor);
    store_int8(levels + dim, max(sub(set1(0.0f), max(sub(set1(0.0f), level), set1(-127.0f))), set1(-127.0f)));
  }
  if (is_key) {
    for (int dim = 0; dim < head_dim; ++dim) levels[dim] = static_cast<int8_t>(levels[dim] ^ 0x80);
    for (int dim = 0; dim < head_dim; dim += 4) std::memcpy(out + dim / 4 * dim_stride, levels + dim, 4);
  } else {
    for (int dim = 0; dim < head_dim; ++dim) out[dim * dim_stride] = static_cast<uint8_t>(levels[dim]);
  }
}

static void write_head(const KvView& kv, const float* head, uint8_t* head_data, int offset, bool is_key) {
  const int element_bytes = kv.type == KvType::kBf16 ? 2 : 1;
  const int64_t dim_stride = is_key ? int64_t{kv.block_size} * 4 : 2 * element_bytes;
  uint8_t* out = head_data + (is_key ? offset * 4 : (offset / 2 * kv.head_dim * 2 + offset % 2) * element_bytes);
  if (kv.type == KvType::kBf16) return write_bf16(head, out, dim_stride, is_key, kv.head_dim);
  write_int8(head, out, head_data + kv.data_bytes() + offset * 2, dim_stride, is_key, kv.head_dim);
}

static void write_token(const KvView& kv, const HeadNorms& norms, const KvWriteBatch& batch, int64_t token) {
  const float* heads = batch.qkv + token * batch.qkv_stride;
  const float* cos = batch.cos + batch.positions[token] * (kv.head_dim / 2);
  const float* sin = batch.sin + batch.positions[token] * (kv.head_dim / 2);
  const int64_t block = batch.slots[token] / kv.block_size;
  const int offset = static_cast<int>(batch.slots[token] % kv.block_size);
  const size_t head_bytes = static_cast<size_t>(kv.head_dim) * sizeof(float);
  alignas(64) float head[kMaxHeadDim];
  for (int index = 0; index < batch.num_heads + kv.num_kv_heads; ++index) {
    std::memcpy(head, heads + int64_t{index} * kv.head_dim, head_bytes);
    const bool is_query = index < batch.num_heads;
    const float* weight = is_query ? norms.query_weight : norms.key_weight;
    if (weight != nullptr) rms_norm(head, weight, norms.eps, kv.head_dim);
    rotate(head, cos, sin, kv.head_dim);
    if (is_query) {
      std::memcpy(batch.queries + token * batch.query_stride + int64_t{index} * kv.head_dim, head, head_bytes);
    } else {
      write_head(kv, head, kv.keys(block, index - batch.num_heads), offset, true);
    }
  }
  const float* values = heads + int64_t{batch.num_heads + kv.num_kv_heads} * kv.head_dim;
  for (int index = 0; index < kv.num_kv_heads; ++index) {
    write_head(kv, values + int64_t{index} * kv.head_dim, kv.values(block, index), offset, false);
  }
}
