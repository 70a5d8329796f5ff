// The Python module's parts. Pointers are passed as integers; the Python wrappers check what they point to.
#pragma once

#include <pybind11/pybind11.h>

namespace baton {

namespace py = pybind11;

void bind_linear(py::module_& module);
void bind_attention(py::module_& module);
void bind_decoder(py::module_& module);
void bind_probe(py::module_& module);

}  // namespace baton
