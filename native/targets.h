// The instruction sets that the kernels were compiled for and the processor has.
#pragma once

#include <vector>

#include "weight.h"

namespace pq {

// The fastest first; plain C++, which runs everywhere, last.
std::vector<const Kernels*> usable_targets();

}  // namespace pq
