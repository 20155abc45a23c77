// After encode.cu: scales that are quantized themselves, in blocks of lines. A block of threads takes
// the values of whole blocks of scales, so that these are found, stored and read again while the
// values are in registers.
//
// Given by -D besides, of scales and offsets: INNER_KIND and INNER_OFFSET_KIND (-1: not quantized),
// ..._BITS, ..._WIDTH (bits that a code takes), ..._TYPE (of their scales), and INNER_GROUP (scales of
// a block, a power of two).

constexpr int WARPS = THREADS / 32, MORE_RESIDENT = RUNS == 4 ? 1024 : 1536;
__shared__ float2 ends[THREADS];                     // of the unit's blocks
__shared__ float highest[2][WARPS];                  // of warps
__shared__ Factors ready[THREADS];
__shared__ u8 fields[2][THREADS];
__shared__ float entries[256];

// A table's code in the lowest bits, its edges in shared memory.
template <int BITS_>
__device__ __forceinline__ u32 halved(const float2* steps, float t) {
  u32 low = 0;
#pragma unroll
  for (int half = 1 << (BITS_ - 1); half; half /= 2)
    if (steps[low + half - 1].x < t) low += half;
  return __float_as_uint(steps[low].y);
}

// Quantizes the unit's numbers, one of each thread, to `fields`; what it is when it is read again.
template <int I, int KIND_, int BITS_, int TYPE>
__device__ __forceinline__ float quantized(const Inner& q, const Upper& upper, float own, u32 count, u32 first,
                                           const float2* steps) {
  const u32 i = threadIdx.x;
  float high = fabsf(own);
#pragma unroll
  for (int apart = min(INNER_GROUP, 32) / 2; apart; apart /= 2)
    high = larger(high, __shfl_xor_sync(~0u, high, apart));
  if constexpr (INNER_GROUP > 32) {
    if (i % 32 == 0) highest[I][i / 32] = high;
    __syncthreads();
    const u32 warp = i / INNER_GROUP * (INNER_GROUP / 32);
#pragma unroll
    for (int w = 0; w < INNER_GROUP / 32; w++) high = larger(high, highest[I][min(warp + w, (u32)WARPS - 1)]);
  }
  fields[I][i] = 0;
  if (i >= count) return 0;
  const u32 bits = rounded_up<TYPE>(flush(__fdiv_rn(flush(high), q.range)));
  if (i % INNER_GROUP == 0) store_bits<TYPE>(q.scales, first + i / INNER_GROUP, bits);
  const Factors f = factors<TYPE>(upper, bits, 0);
  const float t = __fmul_rn(times(own, f.before), f.reciprocal);
  float value;
  u32 code;
  if constexpr (KIND_ == LOOKUP) {
    code = halved<BITS_>(steps, t), value = flush(entries[code]);
  } else {
    const float whole = __fadd_rn(fminf(fmaxf(t, q.low), q.high), ROUNDER);
    code = __float_as_uint(whole), value = __fsub_rn(whole, ROUNDER);
  }
  fields[I][i] = code & ((1 << BITS_) - 1);
  return flush(__fmul_rn(value, number<TYPE>(bits)));
}

// Puts out the unit's fields, which begin at a whole byte of a line, and a line's padding: eight of a
// thread, which are whole bytes.
template <int I, int WIDTH_>
__device__ __forceinline__ void put_fields(const Inner& q, u32 line, u32 place, u32 count, bool is_last) {
  const u32 from = place * WIDTH_ / 8, bytes = is_last ? q.stride - from : count * WIDTH_ / 8;
  u8* to = q.codes + (long long)line * q.stride + from;
  for (u32 first = threadIdx.x; first * WIDTH_ < bytes; first += THREADS) {
    u64 word = 0;
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (first * 8 + j < count) word |= (u64)fields[I][first * 8 + j] << j * WIDTH_;
#pragma unroll
    for (int b = 0; b < WIDTH_; b++)
      if (first * WIDTH_ + b < bytes) to[first * WIDTH_ + b] = word >> 8 * b;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, THREADS < MORE_RESIDENT ? MORE_RESIDENT / THREADS : 1)
    encode_inner(const Operands p) {
  constexpr bool OFFSETS = INNER_OFFSET_KIND >= 0;
  const Upper upper(p);  // there is none
  const u32 line = blockIdx.x / p.tiles, place = blockIdx.x % p.tiles * p.unit;
  const u32 count = min(p.unit, p.count - place);
  Values x[RUNS];
  auto run = [&](int r) {
    const u32 i = r * THREADS + threadIdx.x;
    return Run(p, 0, line * p.count + place + i / GROUP, i % GROUP, GROUP, i / GROUP < count);
  };
#pragma unroll
  for (int r = 0; r < RUNS; r++) x[r].load(p, run(r));
  u32 steps = 0;
  const u32 own = KIND == LOOKUP ? p.intervals * COPIES : 0;
  if constexpr (KIND == LOOKUP) {
    for (u32 i = threadIdx.x; i < own; i += THREADS) shared[i] = p.steps[i / COPIES];
    steps = shared_address(shared) + threadIdx.x % COPIES * 8 + p.origin;
  }
  if constexpr (INNER_KIND == LOOKUP)
    for (u32 i = threadIdx.x; i < 1 << INNER_BITS; i += THREADS)
      shared[own + i] = p.inner[0].steps[i], entries[i] = p.inner[0].table[i];
#pragma unroll
  for (int r = 0; r < RUNS; r++) {
    const u32 i = r * THREADS + threadIdx.x;
    Range range = range_of(x[r], i / GROUP < count ? RUN : 0);
    range.exchange(GROUP);
    if (i % GROUP == 0 && i / GROUP < count) ends[i / GROUP] = {range.low, range.high};
  }
  __syncthreads();
  const u32 i = threadIdx.x, first = line * p.inner_count + place / p.extents;
  float scale = 0, offset = 0;
  if (i < count) {
    Range range;
    range.low = ends[i].x, range.high = ends[i].y;
    if (p.seen && !range.is_finite()) p.seen[0] = 1;
    const u32 bits = stored_scale(p, upper, range);
    scale = number<F32_T>(bits);
    if constexpr (OFFSET != NO_OFFSET) {
      const u32 stored = stored_offset(upper, range, bits);
      if (!OFFSETS) store_bits<OFFSET_TYPE>(p.offsets, line * p.count + place + i, stored);
      offset = number<OFFSET_TYPE>(stored);
    }
  }
  const float2* edges = shared + own;
  scale = quantized<0, INNER_KIND, INNER_BITS, INNER_TYPE>(p.inner[0], upper, scale, count, first, edges);
  if constexpr (OFFSETS)
    offset = quantized<1, INNER_OFFSET_KIND, INNER_OFFSET_BITS, INNER_OFFSET_TYPE>(
        p.inner[1], upper, offset, count, first, nullptr);
  if (i < count) ready[i] = factors(upper, __float_as_uint(scale), offset);
  __syncthreads();
  const bool is_last = place + count == p.count;
  put_fields<0, INNER_WIDTH>(p.inner[0], line, place, count, is_last);
  if constexpr (OFFSETS) put_fields<1, INNER_OFFSET_WIDTH>(p.inner[1], line, place, count, is_last);
#pragma unroll
  for (int r = 0; r < RUNS; r++) {
    const u32 block = (r * THREADS + threadIdx.x) / GROUP;
    put(p, run(r), x[r], ready[min(block, count - 1)], steps);
  }
}
