// Python's view of decoder.h. Tensors come as addresses; cluster/engine/native/decoder.py checks them once a step.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "bindings.h"
#include "decoder.h"

namespace baton {
namespace {

const float* floats(uintptr_t address) { return reinterpret_cast<const float*>(address); }

Layer make_layer(uintptr_t attention_norm, const Weight& qkv, uintptr_t query_norm, uintptr_t key_norm, int window, const Weight& output,
                 uintptr_t mlp_norm, const Weight& gate_up, const Weight& down) {
  return {floats(attention_norm), qkv, floats(query_norm), floats(key_norm), window, output, floats(mlp_norm), gate_up, down};
}

DecoderShape make_shape(int hidden_size, int intermediate_size, int num_heads, float norm_eps, uintptr_t cos, uintptr_t sin) {
  return {hidden_size, intermediate_size, num_heads, norm_eps, floats(cos), floats(sin)};
}

PromptSpan make_span(int first_row, int num_tokens, int first_position, int64_t table_offset) {
  return {first_row, num_tokens, first_position, table_offset};
}

bool run(Decoder& decoder, uintptr_t hidden, int num_rows, uintptr_t positions, uintptr_t slots, int num_decodes, uintptr_t decode_tables,
         int64_t decode_table_stride, uintptr_t context_lens, std::vector<PromptSpan> prompts, uintptr_t block_tables,
         uintptr_t interrupt) {
  return decoder.run({reinterpret_cast<float*>(hidden), num_rows, reinterpret_cast<const int64_t*>(positions),
                      reinterpret_cast<const int64_t*>(slots), num_decodes, reinterpret_cast<const int32_t*>(decode_tables),
                      decode_table_stride, reinterpret_cast<const int32_t*>(context_lens), std::move(prompts),
                      reinterpret_cast<const int32_t*>(block_tables), reinterpret_cast<const uint8_t*>(interrupt)});
}

}  // namespace

void bind_decoder(py::module_& module) {
  py::class_<Layer>(module, "Layer").def(py::init(&make_layer));
  py::class_<DecoderShape>(module, "DecoderShape").def(py::init(&make_shape));
  py::class_<PromptSpan>(module, "PromptSpan").def(py::init(&make_span));
  py::class_<Decoder>(module, "Decoder")
      .def(py::init<const DecoderShape&, const KvView&, int64_t, std::vector<Layer>>())
      .def("run", &run, py::call_guard<py::gil_scoped_release>());
}

}  // namespace baton
