#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "isa.h"
#include "thread_pool.h"

namespace baton {
namespace {

std::vector<std::string> supported_names() {
  std::vector<std::string> names;
  for (const Isa isa : supported_isas()) names.emplace_back(isa_name(isa));
  return names;
}

}  // namespace
}  // namespace baton

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using baton::Pool;
  module.def("isa", [] { return std::string(baton::isa_name(baton::current_isa())); });
  module.def("supported_isas", &baton::supported_names);
  module.def("set_isa", &baton::set_isa);
  module.def("num_threads", [] { return Pool::instance().num_threads(); });
  module.def("set_num_threads", [](int num_threads) {
    if (num_threads < 1) throw std::invalid_argument("num_threads: must be at least 1");
    Pool::instance().set_num_threads(num_threads);
  });
  baton::bind_linear(module);
  baton::bind_attention(module);
  baton::bind_decoder(module);
  baton::bind_probe(module);
}
