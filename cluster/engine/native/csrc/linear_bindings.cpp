// Python's view of linear.h. The engine makes weights, and its head calls `linear`; the other kernels are here to be tested alone.
// Tensors come as addresses, and their callers check them.

#include "bindings.h"
#include "linear.h"

namespace baton {
namespace {

Weight make_weight(WeightFormat format, int64_t num_outputs, int64_t num_inputs, uintptr_t panels, uintptr_t bias) {
  return {format, num_outputs, num_inputs, reinterpret_cast<const uint8_t*>(panels), reinterpret_cast<const float*>(bias)};
}

Source make_source(Prologue prologue, uintptr_t values, int64_t row_stride, uintptr_t norm_weight, float eps) {
  return {prologue, reinterpret_cast<const float*>(values), row_stride, reinterpret_cast<const float*>(norm_weight), eps};
}

Output make_output(uintptr_t values, int64_t row_stride, bool accumulate) {
  return {reinterpret_cast<float*>(values), row_stride, accumulate};
}

Activations make_activations(uintptr_t memory, ActivationKind kind, int64_t num_rows, int64_t num_columns) {
  return activations_over(reinterpret_cast<void*>(memory), kind, num_rows, num_columns);
}

}  // namespace

void bind_linear(py::module_& module) {
  using without_gil = py::call_guard<py::gil_scoped_release>;

  py::enum_<ActivationKind>(module, "ActivationKind")
      .value("TOKEN_INT8", ActivationKind::kTokenInt8)
      .value("GROUP_INT8", ActivationKind::kGroupInt8)
      .value("BF16", ActivationKind::kBf16);
  py::enum_<Prologue>(module, "Prologue")
      .value("PLAIN", Prologue::kPlain)
      .value("RMS_NORM", Prologue::kRmsNorm)
      .value("SILU_MUL", Prologue::kSiluMul);
  py::enum_<WeightFormat>(module, "WeightFormat")
      .value("W8A8", WeightFormat::kW8A8)
      .value("W8G32", WeightFormat::kW8G32)
      .value("W4A8", WeightFormat::kW4A8)
      .value("BF16", WeightFormat::kBf16);

  py::class_<Weight>(module, "Weight").def(py::init(&make_weight));
  py::class_<Source>(module, "Source").def(py::init(&make_source));
  py::class_<Output>(module, "Output").def(py::init(&make_output));
  py::class_<Activations>(module, "Activations").def(py::init(&make_activations)).def_readonly("row_stride", &Activations::row_stride);

  module.attr("GROUP_SIZE") = kGroupSize;
  module.attr("PANEL_CHANNELS") = kPanelColumns;
  module.def("activation_kind", &activation_kind);
  module.def("activation_bytes", &activation_bytes);
  module.def("panel_bytes", &panel_bytes);
  module.def("quantize", &quantize, without_gil());
  module.def("matmul", &matmul, without_gil());
  module.def("linear", &linear, without_gil());
}

}  // namespace baton
