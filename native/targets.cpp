#include "targets.h"

#if defined(PQ_HAS_neon) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace pq {
namespace generic { extern const Kernels kKernels; }
#ifdef PQ_HAS_avx2
namespace avx2 { extern const Kernels kKernels; }
namespace avx512 { extern const Kernels kKernels; }
#endif
#ifdef PQ_HAS_neon
namespace neon { extern const Kernels kKernels; }
namespace neon_dot { extern const Kernels kKernels; }
#endif

std::vector<const Kernels*> usable_targets() {
  std::vector<const Kernels*> found;
#ifdef PQ_HAS_avx2
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
      __builtin_cpu_supports("bmi2"))
    found.push_back(&avx512::kKernels);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c"))
    found.push_back(&avx2::kKernels);
#endif
#ifdef PQ_HAS_neon
#if defined(__linux__)
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP)
#endif  // every Mac with ARM has it
    found.push_back(&neon_dot::kKernels);
  found.push_back(&neon::kKernels);  // every 64-bit ARM has it
#endif
  found.push_back(&generic::kKernels);
  return found;
}

}  // namespace pq
