// Python's view of probe.h; benchmarks/steps/limits.py times the calls.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "probe.h"

namespace baton {

void bind_probe(py::module_& module) {
  py::class_<Peak>(module, "Peak")
      .def_property_readonly("name", [](const Peak& peak) { return peak.name; })
      .def_readonly("num_operations", &Peak::num_operations)
      .def("run", &run_peak, py::call_guard<py::gil_scoped_release>());
  module.def("peaks", &peaks);
  module.def(
      "read_stream", [](uintptr_t data, int64_t num_bytes) { return read_stream(reinterpret_cast<const uint8_t*>(data), num_bytes); },
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace baton
