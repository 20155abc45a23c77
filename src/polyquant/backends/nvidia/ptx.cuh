// What encode.cu asks of the processor in its own language. (A test has the same in plain C++.)

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Subnormal operands and results are zeros of their sign.
__device__ __forceinline__ float times(float a, float b) {
  float d;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
__device__ __forceinline__ float plus(float a, float b) {
  float d;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

// NaN where either is.
__device__ __forceinline__ float larger(float a, float b) {
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
__device__ __forceinline__ float smaller(float a, float b) {
  float d;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

__device__ __forceinline__ float of_f16(u16 bits) {
  float d;
  asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(bits));
  return d;
}
__device__ __forceinline__ u16 f16_up(float x) {
  u16 d;
  asm("cvt.rp.f16.f32 %0, %1;" : "=h"(d) : "f"(x));
  return d;
}
__device__ __forceinline__ u16 f16_near(float x) {
  u16 d;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(x));
  return d;
}

__device__ __forceinline__ u32 shared_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ float2 shared_pair(u32 address) {
  float2 d;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(d.x), "=f"(d.y) : "r"(address));
  return d;
}

// Pairs of the input's type, NaN where either is.
#if IN == 1
#define PAIR "f16x2"
#else
#define PAIR "bf16x2"
#endif
__device__ __forceinline__ u32 larger2(u32 a, u32 b) {
  u32 d;
  asm("max.NaN." PAIR " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 smaller2(u32 a, u32 b) {
  u32 d;
  asm("min.NaN." PAIR " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// Pairs of bf16: a * b + c rounded once, and the magnitudes. (Subnormal numbers stay.)
__device__ __forceinline__ u32 fused2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ u32 absolute2(u32 a) {
  u32 d;
  asm("abs.bf16x2 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}
// The upper half of a float32, twice.
__device__ __forceinline__ u32 twice(u32 x) { return __byte_perm(x, x, 0x3232); }

// The nearest codes of two numbers, saturated, the first in the low byte.
#if __CUDA_ARCH__ >= 890
#define HAS_FP8 1
__device__ __forceinline__ u32 fp8_pair(float low, float high) {
  u16 d;
#if MANTISSA == 3
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
#else
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
#endif
  return d;
}
#else
#define HAS_FP8 0
__device__ __forceinline__ u32 fp8_pair(float low, float high) { return 0; }
#endif
