// CUDA kernels launched: on a stream, and from XLA's programs, where a launch is data: the
// attributes of a custom call.
#pragma once

#include <cstdint>
#include <string>

#include "xla_frame.h"

namespace pq {

// A launch of a kernel of one argument. blocks: along x, y, z; cluster: likewise; shared: bytes.
struct CudaLaunch {
  unsigned blocks[3], cluster[3], threads, shared;
  bool early;  // the kernel waits by itself for the one before it on the stream
};

// Enqueues a kernel (a CUfunction or CUkernel) on a stream; what the driver answers (CUresult).
int enqueue(const CudaLaunch& given, void* function, void* stream, void* argument);

// Keeps machine code under its digest, by which launches name it. `argument`: bytes of the one
// argument of its function. What is kept already stays.
void keep_cuda_kernel(const std::string& digest, std::string code, std::string function,
                      size_t argument);

// The handler of XLA's custom call, of its stages "initialize" and "execute". Attributes:
//   kernel: the digest.
//   launch: blocks along x, y, z; those of a cluster; threads of a block; bytes of its shared memory.
//   argument: the argument's bytes, as int64.
//   places: pairs of an offset in the argument and the number of the buffer whose address goes
//       there, operands first.
//   maps: of each CUtensorMap (two at most; of bf16 in three axes, with the 128-byte swizzle) its
//       offset in the argument and its buffer, extents from the last axis on, bytes between lines of
//       the others, and rows of a tile (of 64 values).
// It only enqueues, on XLA's stream.
xla::Error* cuda_launch(xla::Frame* frame);

}  // namespace pq
