// Products of the CPU in XLA's programs.
#pragma once

#include "xla_ffi.h"

namespace pq {

// The handler of XLA's custom call: float rows x (batch, m, k), the first operand, by a stored
// weight, whose arrays are the others; the result is (batch, m, n). Its attribute `facts`, int64:
//   whether lines of codes lie along k, and the weight's:
//     shape and block, each with the number of its axes first; bits, value bits, kind, sign, kind of offset, a
//     minifloat's six numbers (zeros for others); the operands of its codes, its table, and its
//     tensor scale (-1: none); its scales; its offsets, if it has them.
//   Scales and offsets: the number of their type and of their operand; or that of kNested, and what
//   there is to be said of a weight.
xla::Error* xla_product(xla::Frame* frame);

}  // namespace pq
