// Python's view of kv_write.h and attention.h. The engine takes `KvView` and the limits; the kernels are here to be tested alone, and
// tests/engine/native/attention.py checks what they get.

#include <pybind11/pybind11.h>

#include <climits>

#include "attention.h"
#include "kv_write.h"

namespace baton {
namespace {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

KvView make_view(uintptr_t base, int64_t block_stride, int64_t head_stride, int64_t kv_stride, int num_kv_heads, int head_dim,
                 int block_size, bool is_int8) {
  const KvType type = is_int8 ? KvType::kInt8 : KvType::kBf16;
  return {pointer<uint8_t>(base), block_stride, head_stride, kv_stride, num_kv_heads, head_dim, block_size, type};
}

void bound_write_kv(const KvView& kv, uintptr_t query_norm, uintptr_t key_norm, float eps, uintptr_t qkv, int64_t qkv_stride,
                    int num_tokens, int num_heads, uintptr_t cos, uintptr_t sin, uintptr_t positions, uintptr_t slots,
                    uintptr_t queries, int64_t query_stride) {
  const HeadNorms norms{pointer<const float>(query_norm), pointer<const float>(key_norm), eps};
  const KvWriteBatch batch{pointer<const float>(qkv), qkv_stride, num_tokens, num_heads, pointer<const float>(cos),
                           pointer<const float>(sin), pointer<const int64_t>(positions), pointer<const int64_t>(slots),
                           pointer<float>(queries), query_stride};
  write_kv(kv, norms, batch);
}

void bound_decode(const KvView& kv, int num_heads, float scale, int window, uintptr_t queries, int64_t query_stride,
                  uintptr_t block_tables, int64_t table_stride, uintptr_t context_lens, int num_seqs, uintptr_t out) {
  const DecodeBatch batch{pointer<const float>(queries), query_stride, pointer<const int32_t>(block_tables), table_stride,
                          pointer<const int32_t>(context_lens), num_seqs, pointer<float>(out)};
  decode_attention(kv, {num_heads, scale, window}, batch);
}

void bound_prefill(const KvView& kv, int num_heads, float scale, int window, uintptr_t queries, int64_t query_stride, int num_tokens,
                   int first_position, uintptr_t block_table, uintptr_t out) {
  const PrefillChunk chunk{pointer<const float>(queries), query_stride, num_tokens, first_position, pointer<const int32_t>(block_table),
                           pointer<float>(out)};
  prefill_attention(kv, {num_heads, scale, window}, chunk);
}

}  // namespace

void bind_attention(pybind11::module_& module) {
  namespace py = pybind11;
  using without_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<KvView>(module, "KvView").def(py::init(&make_view));
  module.attr("MAX_WINDOW") = INT_MAX;
  module.attr("HEAD_DIM_STEP") = kHeadDimStep;
  module.attr("MAX_HEAD_DIM") = kMaxHeadDim;
  module.attr("MIN_BLOCK_SIZE") = kMinBlockSize;
  module.attr("MAX_BLOCK_SIZE") = kMaxBlockSize;
  module.attr("MAX_HEADS_PER_KV_HEAD") = kMaxGroupSize;
  module.def("write_kv", &bound_write_kv, without_gil());
  module.def("decode_attention", &bound_decode, without_gil());
  module.def("prefill_attention", &bound_prefill, without_gil());
}

}  // namespace baton
