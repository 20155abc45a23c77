// What AVX2 and AVX-512 share.
#pragma once

#include <immintrin.h>

namespace pq::PQ_TARGET {

// Results and inputs below the smallest normal float32 are zeros, as the contract has it.
class FlushSubnormals {
 public:
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(before_); }
  FlushSubnormals(const FlushSubnormals&) = delete;

 private:
  unsigned before_;
};

// Always inlined: GCC takes a function that only asks for memory for one without effect, and drops it.
inline __attribute__((always_inline)) void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

}  // namespace pq::PQ_TARGET
