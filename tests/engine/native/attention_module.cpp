// The attention kernels as a module of their own.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "isa.h"
#include "thread_pool.h"

namespace baton {
void bind_attention(pybind11::module_& module);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("supported_isas", [] {
    std::vector<std::string> names;
    for (const baton::Isa isa : baton::supported_isas()) names.emplace_back(baton::isa_name(isa));
    return names;
  });
  module.def("isa", [] { return std::string(baton::isa_name(baton::current_isa())); });
  module.def("set_isa", &baton::set_isa);
  module.def("num_threads", [] { return baton::Pool::instance().num_threads(); });
  module.def("set_num_threads", [](int num_threads) { baton::Pool::instance().set_num_threads(num_threads); });
  baton::bind_attention(module);
}
