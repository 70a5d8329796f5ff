#include "isa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <stdexcept>

namespace baton {
namespace {

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512bf16");
}

// Linux hands out the tile registers, for all threads of the process, only to those who ask.
bool has_amx() {
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return has_avx512() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
         __builtin_cpu_supports("amx-bf16") && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

Isa& chosen() {
  static Isa isa = supported_isas().back();
  return isa;
}

}  // namespace

std::vector<Isa> supported_isas() {
  std::vector<Isa> isas{Isa::kPortable};
  if (has_avx2()) isas.push_back(Isa::kAvx2);
  if (has_avx512()) isas.push_back(Isa::kAvx512);
  if (has_amx()) isas.push_back(Isa::kAmx);
  return isas;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAmx: return "amx";
    case Isa::kAvx512: return "avx512";
    case Isa::kAvx2: return "avx2";
    case Isa::kPortable: break;
  }
  return "portable";
}

Isa current_isa() { return chosen(); }

void set_isa(const std::string& name) {
  for (const Isa isa : supported_isas()) {
    if (name == isa_name(isa)) {
      chosen() = isa;
      return;
    }
  }
  throw std::invalid_argument("isa: " + name + " is not supported by this machine");
}

}  // namespace baton
