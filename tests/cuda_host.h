// ptx.cuh in plain C++, and what CUDA C++ has beyond it: kernels on the CPU, thread by thread.
//
// Where threads exchange something, each runs up to there; then all run anew, with the answers.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define HAS_FP8 0
struct float2 { float x, y; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct dim { u32 x; };
static dim threadIdx, blockIdx, gridDim;
static float2 shared[1 << 14];

using std::fabs, std::fma, std::fmax, std::fmin;
template <class T> T min(T a, T b) { return a < b ? a : b; }
template <class T> T max(T a, T b) { return a > b ? a : b; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline u32 __float_as_uint(float x) { u32 b; memcpy(&b, &x, 4); return b; }
inline float __uint_as_float(u32 b) { float x; memcpy(&x, &b, 4); return x; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x > 0 ? x < 1 ? x : 1 : 0; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmaf_ru(float a, float b, float c) {  // a * b and its distance from the sum are exact here
  const float near = a * b + c;
  return near - a * b < c ? nextafterf(near, INFINITY) : near;
}
inline u32 __funnelshift_l(u32 low, u32 high, int s) { return high << s | low >> (32 - s); }
inline u32 __funnelshift_r(u32 low, u32 high, int s) { return low >> s | high << (32 - s); }

inline float normal(float x) { return fabsf(x) < 1.1754943508222875e-38f ? copysignf(0, x) : x; }
inline float times(float a, float b) { return normal(normal(a) * normal(b)); }
inline float plus(float a, float b) { return normal(normal(a) + normal(b)); }
inline float larger(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }
inline float smaller(float a, float b) { return a != a ? a : b != b ? b : a < b ? a : b; }
inline float of_f16(u16 bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                     : exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
  return bits >> 15 ? -size : size;
}
template <class Round>
u16 to_f16(float x, Round round) {
  const int exponent = x == 0 ? -14 : max(ilogbf(x), -14);
  const u32 size = (exponent + 14) * 1024 + (u32)round(fabsf(ldexpf(x, 10 - exponent)));
  return size | (std::signbit(x) ? 0x8000 : 0);
}
inline u16 f16_up(float x) { return to_f16(x, ceilf); }
inline u16 f16_near(float x) { return to_f16(x, rintf); }
inline u32 shared_address(const void* p) { return (u8*)p - (u8*)shared; }
inline float2 shared_pair(u32 address) { return *(float2*)((u8*)shared + address); }
inline float half_of(u32 pair, int i) {
  return IN == 1 ? of_f16(pair >> 16 * i) : __uint_as_float(pair >> 16 * i << 16);
}
template <class Pick>
u32 picked(u32 a, u32 b, Pick first) {
  u32 d = 0;
  for (int i = 0; i < 2; i++) d |= ((first(half_of(a, i), half_of(b, i)) ? a : b) >> 16 * i & 0xFFFF) << 16 * i;
  return d;
}
inline u32 larger2(u32 a, u32 b) { return picked(a, b, [](float x, float y) { return x != x || x > y; }); }
inline u32 smaller2(u32 a, u32 b) { return picked(a, b, [](float x, float y) { return x != x || x < y; }); }
inline u16 to_bf16(double x) {
  const int exponent = x == 0 || std::isinf(x) ? -126 : max(ilogb(x), -126);
  return __float_as_uint(std::isinf(x) ? x : ldexp(nearbyint(ldexp(x, 7 - exponent)), exponent - 7)) >> 16;
}
inline u32 fused2(u32 a, u32 b, u32 c) {
  u32 d = 0;
  for (int i = 0; i < 2; i++) {
    const double product = (double)half_of(a, i) * half_of(b, i);
    d |= to_bf16(product + half_of(c, i)) << 16 * i;
  }
  return d;
}
inline u32 absolute2(u32 a) { return a & 0x7FFF7FFFu; }
inline u32 twice(u32 x) { return x >> 16 | (x & 0xFFFF0000u); }
inline u32 fp8_pair(float, float) { return 0; }

// -- threads --------------------------------------------------------------------------------------

struct Waits {};
struct Thread { std::vector<u32> answers; size_t next; u32 asked; int apart; };
static std::vector<Thread> threads;

inline u32 exchange(u32 value, int apart) {
  Thread& me = threads[threadIdx.x];
  if (me.next < me.answers.size()) return me.answers[me.next++];
  me.asked = value, me.apart = apart;
  throw Waits();
}
inline float __shfl_xor_sync(u32, float x, int apart) {
  return __uint_as_float(exchange(__float_as_uint(x), apart));
}
inline void __syncthreads() { exchange(0, 0); }
inline void __threadfence() {}
inline u32 atomicMax(u32* to, u32 x) { return *to = max(*to, x); }
inline u32 atomicAdd(u32* to, u32 x) { return (*to += x) - x; }

// Runs a kernel; false where not all threads came to an exchange that one came to.
template <class Kernel, class Operands>
bool launch(Kernel kernel, const void* operands, u32 blocks, u32 count) {
  Operands p;
  memcpy(&p, operands, sizeof p);
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
    threads.assign(count, {});
    for (u32 waiting = count; waiting;) {
      waiting = 0;
      for (threadIdx.x = 0; threadIdx.x < count; threadIdx.x++) {
        threads[threadIdx.x].next = 0;
        try { kernel(p); } catch (Waits) { waiting++; }
      }
      if (waiting && waiting < count) return false;
      if (!waiting) break;
      std::vector<u32> asked;
      for (Thread& each : threads) asked.push_back(each.asked);
      for (u32 i = 0; i < count; i++) threads[i].answers.push_back(asked[i ^ threads[i].apart]);
    }
  }
  return true;
}
