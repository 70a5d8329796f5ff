// Which instruction set the kernels use: the best that this machine has, unless a test chooses another.
#pragma once

#include <string>
#include <vector>

namespace baton {

enum class Isa {
  kPortable,
  kAvx2,    // with FMA and F16C
  kAvx512,  // with VNNI and BF16
  kAmx,     // kAvx512 and the int8 and bf16 tiles
};

Isa current_isa();
std::vector<Isa> supported_isas();  // in rising order
const char* isa_name(Isa isa);

// Throws std::invalid_argument for a name that this machine does not support. Not while a kernel runs.
void set_isa(const std::string& name);

}  // namespace baton
