#include "kernels.h"

namespace baton {

const Kernels kAmxKernels = kAvx512Kernels;

}  // namespace baton
