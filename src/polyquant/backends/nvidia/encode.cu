// From numbers to codes: a lane takes runs of RUN values (32 bytes) of one block, whose codes are whole
// bytes. The lanes of a block find its range, its stored scale and offset, and the codes, while the
// values are in registers. Every step is rounded as the definition has it: none is contracted,
// quotients are correctly rounded, subnormal numbers are zeros.
//
// Given by -D: IN (the type of x), KIND, BITS, MANTISSA, TOP (of a minifloat), LOW and HIGH (of an
// integer), BYTE (one code a byte), SCALE, OFFSET, OFFSET_TYPE, OFFSET_TOP (of integer zeros),
// CODES (whether they are wanted), CALIBRATES, SATURATES, GROUP (lanes a block, a power of two; 0: a
// block of threads; without CALIBRATES nothing), ACROSS (of those the lanes of a line; 0: a block is
// in one line), RUNS (of a lane), THREADS, WHOLE (every run is whole and aligned), COPIES and DENSE
// (of a table), BOUNDED (no number is far beyond its ends), POWERS (divisors are powers of two), TWO_LEVELS.

enum { INTEGER = 0, MINIFLOAT = 1, LOOKUP = 2 };
enum { F32_T = 0, F16_T = 1, BF16_T = 2, UE8M0_T = 3, UE4M3_T = 4, U8_T = 5 };
enum { NO_OFFSET = 0, INTEGER_ZERO = 1, FLOAT_ZERO = 2, BIAS = 3 };

constexpr int WIDTH = BYTE ? 8 : BITS, SIZE = IN == F32_T ? 4 : 2, RUN = 32 / SIZE;
constexpr int RUN_BYTES = RUN * WIDTH / 8;
constexpr float MAX = 0x1.fffffep127f, TINY = 0x1p-126f;
constexpr float BIG = 0x1p126f, DOWN = 0x1p-24f;
constexpr float ROUNDER = 12582912.0f;  // added, it rounds to whole numbers, whose bits are the lowest

// Scales or offsets that are quantized themselves, integers or a table's entries (inner.cu).
struct Inner {
  u8* codes;
  void* scales;
  const float2* steps;  // of a table: its edges and codes, to be halved
  const float* table;
  float range, low, high;
  u32 stride;  // bytes of a line of codes
};

// Quotients of numbers below 2^31: a product with 2^shift / divisor, rounded up.
struct Divider {
  u32 by, factor, shift;

  __device__ __forceinline__ u32 operator()(u32 x) const { return (u64)x * factor >> shift; }
};

struct Operands {
  const u8* x;
  u8* codes;
  void* scales;
  void* offsets;
  const float* tensor_scale;
  const float2* steps;  // a table's: of each of its intervals the edge in it, and the codes around it
  u32* work;            // of `largest`: the largest yet, and how many blocks of threads are done
  u32* seen;            // null, or what is set to 1 by NaN or infinity, and by the smallest scale
  float range;          // what a block's range is divided by
  float by;             // intervals are 1 / by wide
  float inverse, span, bottom;  // all of them are 1 / inverse wide; one less than there are; the first
  float scale_max;      // of two levels, where the upper one is wanted: the largest scale
  u32 intervals, origin;  // bytes from the first to the one of the number 0, less ROUNDER's bits of them
  u32 blocks, count, group;  // of all, of a line; runs of a block
  u32 tiles;                 // blocks of threads of a line, where it is not those of a block
  u32 shift;                 // group as a power of two, if it is one; else 32
  u32 h1, h2, e0, e1, e2, c1, c2;  // of the grid: leading axes, extents of blocks, and blocks
  long long length, extent, stride;  // of a line and a block, values; of a line, bytes of codes
  Divider lines, rows;               // by count and c2
  Inner inner[2];                    // scales, offsets
  u32 unit, extents, inner_count;    // inner.cu: scales of a block of threads, of a block; a line's blocks
};

__device__ __forceinline__ float flush(float x) { return times(x, 1.0f); }

// -- runs ----------------------------------------------------------------------------------------

struct Run {
  int values, bytes;  // as many as there are, of RUN and RUN_BYTES
  long long at, byte;

  // Run j of block `place` of a line.
  __device__ __forceinline__ Run(const Operands& p, u32 line, u32 place, u32 j, u32 group, bool inside) {
    if constexpr (WHOLE) {
      at = line * p.length + ((long long)place * group + j) * RUN, byte = at * WIDTH / 8;
      values = inside ? RUN : 0, bytes = inside ? RUN_BYTES : 0;
    } else {
      const long long first = place * p.extent + (long long)RUN * j, from = first * WIDTH / 8;
      const long long end = min((place + 1) * p.extent, p.length);
      const long long ends = place + 1 == p.count ? p.stride : (place + 1) * p.extent * WIDTH / 8;
      at = line * p.length + first, byte = line * p.stride + from;
      values = inside ? (int)max(min(end - first, (long long)RUN), 0ll) : 0;
      bytes = inside ? (int)max(min(ends - from, (long long)RUN_BYTES), 0ll) : 0;
    }
  }
};

struct Values {
  u32 words[8];

  __device__ __forceinline__ void load(const Operands& p, const Run& run) {
    const u8* from = p.x + run.at * SIZE;
    if (WHOLE ? run.values != 0 : run.values == RUN && (size_t)from % 16 == 0) {
      ((uint4*)words)[0] = ((const uint4*)from)[0];
      ((uint4*)words)[1] = ((const uint4*)from)[1];
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        if constexpr (SIZE == 4) {
          words[i] = i < run.values ? ((const u32*)from)[i] : 0;
        } else {
          const u16* pair = (const u16*)from + 2 * i;
          words[i] = (2 * i < run.values ? pair[0] : 0) | (2 * i + 1 < run.values ? pair[1] : 0) << 16;
        }
      }
    }
  }
  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (IN == F32_T) return __uint_as_float(words[i]);
    const u32 pair = words[i / 2];
    if constexpr (IN == F16_T) return of_f16(i % 2 ? pair >> 16 : pair & 0xFFFF);
    return __uint_as_float(i % 2 ? pair & 0xFFFF0000u : pair << 16);
  }
};

// -- ranges --------------------------------------------------------------------------------------

// The largest magnitude is `high`, or, with an offset, the ends; zeros count where 0 must be in it.
struct Range {
  static constexpr bool HOLDS_ZERO = OFFSET != BIAS;
  float low = HOLDS_ZERO ? 0.0f : __uint_as_float(0x7F800000);
  float high = HOLDS_ZERO ? 0.0f : __uint_as_float(0xFF800000);

  __device__ __forceinline__ void join(float other_low, float other_high) {
    if constexpr (OFFSET != NO_OFFSET) low = smaller(low, other_low);
    high = larger(high, other_high);
  }
  // Of all values: NaN and infinities are among the ends.
  __device__ __forceinline__ bool is_finite() const {
    return high <= MAX && (OFFSET == NO_OFFSET || low >= -MAX);
  }
  __device__ __forceinline__ void exchange(int lanes) {
#pragma unroll
    for (int apart = lanes / 2; apart; apart /= 2) {
      float other = 0;
      if constexpr (OFFSET != NO_OFFSET) other = __shfl_xor_sync(~0u, low, apart);
      join(other, __shfl_xor_sync(~0u, high, apart));
    }
  }
};

__device__ __forceinline__ Range range_of(const Values& x, int values) {
  Range found;
  if (SIZE == 2 && !SATURATES && (Range::HOLDS_ZERO || WHOLE)) {
    if (WHOLE && !values) return found;
    constexpr u32 SIZES = OFFSET == NO_OFFSET ? 0x7FFF7FFFu : ~0u;
    u32 high = x.words[0] & SIZES, low = x.words[0];
#pragma unroll
    for (int i = 1; i < 8; i++) {
      high = larger2(high, x.words[i] & SIZES);
      if constexpr (OFFSET != NO_OFFSET) low = smaller2(low, x.words[i]);
    }
    Values ends;
    ends.words[0] = low, ends.words[1] = high;
    found.join(ends[0], ends[2]);
    found.join(ends[1], ends[3]);
    return found;
  }
#pragma unroll
  for (int i = 0; i < RUN; i++) {
    float one = x[i];
    if (SATURATES && !(fabsf(one) <= MAX)) one = 0;
    if (WHOLE ? values != 0 : i < values) found.join(one, OFFSET == NO_OFFSET ? fabsf(one) : one);
  }
  return found;
}

// -- stored numbers ------------------------------------------------------------------------------

// The bits of a scale >= 0 in its type: the smallest not below.
template <int TYPE>
__device__ __forceinline__ u32 rounded_up(float x) {
  if constexpr (TYPE == F16_T) return f16_up(fminf(x, 65504.0f));
  if constexpr (TYPE == BF16_T) return min((__float_as_uint(x) + 0xFFFF) >> 16, 0x7F7Fu);
  if constexpr (TYPE == UE8M0_T) return min((__float_as_uint(x) + 0x7FFFFF) >> 23, 254u);
  if constexpr (TYPE == UE4M3_T) {
    const float limited = fminf(x, 448.0f);
    const float power = __uint_as_float(__float_as_uint(fmaxf(limited, 0.015625f)) & 0x7F800000);
    const u32 up = __float_as_uint(__fmaf_ru(power, 1048576.0f, limited));
    return (up + (up >> 20) - (141u << 3)) & 0x7F;
  }
  return __float_as_uint(fminf(x, MAX));
}

template <int TYPE>
__device__ __forceinline__ u32 stored_bits(const void* from, u32 at) {
  if constexpr (TYPE == F32_T) return ((const u32*)from)[at];
  if constexpr (TYPE == F16_T || TYPE == BF16_T) return ((const u16*)from)[at];
  return ((const u8*)from)[at];
}
template <int TYPE>
__device__ __forceinline__ void store_bits(void* to, u32 at, u32 bits) {
  if constexpr (TYPE == F32_T) {
    ((u32*)to)[at] = bits;
  } else if constexpr (TYPE == F16_T || TYPE == BF16_T) {
    ((u16*)to)[at] = bits;
  } else {
    ((u8*)to)[at] = bits;
  }
}
// As float32: of UE8M0's byte 0, which is not normal, twice its number.
template <int TYPE>
__device__ __forceinline__ float number(u32 bits) {
  if constexpr (TYPE == F32_T) return flush(__uint_as_float(bits));
  if constexpr (TYPE == F16_T) return of_f16(bits);
  if constexpr (TYPE == BF16_T) return flush(__uint_as_float(bits << 16));
  if constexpr (TYPE == UE8M0_T) return __uint_as_float(max(bits, 1u) << 23);
  if constexpr (TYPE == UE4M3_T)
    return __fmul_rn(__uint_as_float((bits & 0x7F) << 20 | (bits & 0x80) << 24), 0x1p120f);
  return bits;
}

// The bits of an offset in its type: to nearest, saturated; of zeros +0.
__device__ __forceinline__ u32 nearest(float x) {
  x = x == 0 ? 0.0f : x;
  if constexpr (OFFSET_TYPE == U8_T) return (u32)rintf(fminf(fmaxf(x, 0.0f), OFFSET_TOP));
  if constexpr (OFFSET_TYPE == F16_T) return f16_near(fminf(fmaxf(x, -65504.0f), 65504.0f));
  x = fminf(fmaxf(x, -MAX), MAX);
  const u32 bits = __float_as_uint(x);
  if constexpr (OFFSET_TYPE == F32_T) return bits;
  return min((bits & 0x7FFFFFFF) + 0x7FFF + (bits >> 16 & 1) >> 16, 0x7F7Fu) | bits >> 31 << 15;
}

// What a block's values are multiplied by, first and second, and what is taken from them or added.
struct Factors {
  float before, reciprocal, offset;
};

// Of two levels the tensor's scale, and 1 over what a range is divided by in all, nearly, or 0.
struct Upper {
  float scale, inverse;

  __device__ __forceinline__ Upper(const Operands& p) {
    scale = TWO_LEVELS ? *p.tensor_scale : 1.0f;
    const bool is_usual = SCALE == UE4M3_T && scale >= 0x1p-90f && scale <= 0x1p90f;
    inverse = is_usual ? __fdividef(1.0f, scale * p.range) : 0.0f;
  }
};

template <int TYPE = SCALE>
__device__ __forceinline__ float divisor(const Upper& upper, u32 bits) {
  const float scale = number<TYPE>(bits);
  return TWO_LEVELS ? flush(__fmul_rn(scale, upper.scale)) : scale;
}

template <int TYPE = SCALE>
__device__ __forceinline__ Factors factors(const Upper& upper, u32 bits, float offset) {
  if (POWERS && TYPE == UE8M0_T && bits - 1 < 253)
    return {1.0f, __uint_as_float((254 - bits) << 23), offset};
  Factors f = {TYPE == UE8M0_T && bits == 0 ? 2.0f : 1.0f, 0.0f, offset};
  float scale = divisor<TYPE>(upper, bits);
  if (TYPE == F32_T || TYPE == BF16_T || TYPE == UE8M0_T || TWO_LEVELS) {
    const float down = fabsf(scale) > BIG ? DOWN : 1.0f;
    scale *= down, f.before *= down;
  }
  f.reciprocal = scale == 0 ? 0.0f : __frcp_rn(scale);
  return f;
}

// The bits of a range's scale. A quotient is above a power of two if it is that before it is rounded,
// so of powers above the smallest normal number the difference of the bits says which. Of two levels
// e4m3 has but four significant bits, which are known unless a number of the type is close.
__device__ __forceinline__ u32 stored_scale(const Operands& p, const Upper& upper, const Range& range) {
  const float low = flush(range.low), high = flush(range.high);
  const float width = OFFSET == NO_OFFSET ? high : fminf(fmaxf(__fsub_rn(high, low), 0.0f), MAX);
  const int above = __float_as_uint(width) - __float_as_uint(p.range) + (126 << 23);
  if (POWERS && above > 0) return min((u32)above + 0xFFFFFF >> 23, 254u);
  if constexpr (TWO_LEVELS && SCALE == UE4M3_T) {
    const u32 nearly = __float_as_uint(width * upper.inverse), above_least = nearly - 0x3C800000;
    if (above_least < 0x43E00000 - 0x3C800000 - 64 && (nearly + 32 & 0xFFFFF) >= 64)
      return (nearly >> 20) + 1 - (120 << 3);
  }
  float ideal = __fdiv_rn(width, p.range);
  if (TWO_LEVELS) ideal = __fdiv_rn(flush(ideal), upper.scale);
  return rounded_up<SCALE>(flush(ideal));
}

// The bits of the offset of a range whose scale is known.
__device__ __forceinline__ u32 stored_offset(const Upper& upper, const Range& range, u32 scale_bits) {
  float offset = flush(range.low);
  if constexpr (OFFSET != BIAS) {
    const float scale = divisor(upper, scale_bits);
    const float zero = __fdiv_rn(-offset, scale == 0 ? 1.0f : scale);
    offset = scale == 0 ? 0.0f : flush(SCALE == UE8M0_T && scale_bits == 0 ? zero * 2 : zero);
  }
  return nearest(offset);
}

// What a thread has seen of ranges and scales.
struct Seen {
  bool is_bad = false, has_smallest = false;

  __device__ __forceinline__ void tell(const Operands& p) const {
    if (p.seen && is_bad) p.seen[0] = 1;
    if (p.seen && has_smallest) p.seen[1] = 1;
  }
};

// The scale and offset of a range, stored by the lane that leads.
__device__ __forceinline__ Factors calibrated(const Operands& p, const Upper& upper, const Range& range,
                                              u32 block, bool leads, Seen& seen) {
  seen.is_bad |= !range.is_finite();
  const u32 bits = stored_scale(p, upper, range);
  if (leads) store_bits<SCALE>(p.scales, block, bits);
  if constexpr (SCALE == F16_T || SCALE == UE4M3_T) seen.has_smallest |= bits == 1;
  float offset = 0;
  if constexpr (OFFSET != NO_OFFSET) {
    const u32 stored = stored_offset(upper, range, bits);
    if (leads) store_bits<OFFSET_TYPE>(p.offsets, block, stored);
    offset = number<OFFSET_TYPE>(stored);
  }
  return factors(upper, bits, offset);
}

// The line of the grid that a line belongs to.
__device__ __forceinline__ u32 grid_line(const Operands& p, u32 line) {
  if (p.c2 == 0) return line;  // each its own
  const u32 inner = line / p.h2;
  return ((inner / p.h1 / p.e0) * p.c1 + inner % p.h1 / p.e1) * p.c2 + line % p.h2 / p.e2;
}

// The stored scale and offset of a block.
__device__ __forceinline__ Factors given(const Operands& p, const Upper& upper, u32 at) {
  float offset = 0;
  if constexpr (OFFSET != NO_OFFSET) offset = number<OFFSET_TYPE>(stored_bits<OFFSET_TYPE>(p.offsets, at));
  return factors(upper, stored_bits<SCALE>(p.scales, at), offset);
}

// -- codes ---------------------------------------------------------------------------------------

// Whether no number is so far beyond the largest code that it is rounded to another, as scales are
// rounded up and do not saturate. (Powers of two: but for the smallest, which stands for less too.)
constexpr bool INSIDE = CALIBRATES && !SATURATES;

// A minifloat's code in the highest bits. Added to its own power of two times a step, a number is
// rounded to whole steps; these and the power's exponent, side by side, add up to the code. (The
// lower bits are of no use.)
__device__ __forceinline__ u32 minifloat(float t) {
  constexpr int M = MANTISSA, BIAS_ = KIND == MINIFLOAT ? (1 << (BITS - 2 - M)) - 1 : 1;
  constexpr float LEAST = 1.0f / (1 << (BIAS_ - 1));
  constexpr u32 BY = (1u << (32 - BITS)) + (1u << (9 - BITS + M));
  constexpr u32 MORE = (u32)(BIAS_ - 1 - 150 + M) << M << (32 - BITS);
  const float size = INSIDE && TWO_LEVELS ? fabsf(t) : fminf(fabsf(t), TOP);
  const float power = __uint_as_float(__float_as_uint(fmaxf(size, LEAST)) & 0x7F800000);
  const u32 up = __float_as_uint(fmaf(power, (float)(1 << (23 - M)), size)) * BY + MORE;
  return (__float_as_uint(t) & 0x80000000u) | up;
}

// The same of a pair of bf16 times powers of two: exact in bf16, but for what rounds to zero anyway.
// (They are moved by another one, so that the lowest bits of the exponents count from zero.)
constexpr bool PAIRS = POWERS && KIND == MINIFLOAT && IN == BF16_T && BITS < 8 && MANTISSA < 3 && !SATURATES;
constexpr float SMALLEST_PAIR = 0x1p-110f, LARGEST_PAIR = 0x1p120f;  // reciprocals

__device__ __forceinline__ void minifloats(u32 x, float reciprocal, u32* tops) {
  constexpr int M = PAIRS ? MANTISSA : 0, WIDE = PAIRS ? BITS : 4, EXPONENTS = WIDE - 1 - M;
  constexpr int LEAST = 2 - (1 << (EXPONENTS - 1)), MOVED = -((LEAST + 134 - M) & ((2 << EXPONENTS) - 1));
  constexpr u32 BY = (1u << (16 - WIDE)) + (1u << (9 - WIDE + M));
  const u32 r = __float_as_uint(reciprocal) + (MOVED << 23), top = __float_as_uint(TOP) + (MOVED << 23);
  const u32 t = fused2(x, twice(r), 0x80008000u), all = absolute2(t);
  const u32 size = INSIDE ? all : smaller2(all, twice(top));
  const u32 power = larger2(size, twice((u32)(LEAST + MOVED + 127) << 23)) & 0x7F807F80u;
  const u32 up = fused2(power, twice((u32)(127 + 7 - M) << 23), size);
  tops[0] = (t << 16 & 0x80000000u) | (up << 16) * BY;
  tops[1] = (t & 0x80000000u) | (up & 0xFFFF0000u) * BY;
}

extern __shared__ float2 shared[];      // a table's steps, COPIES of each: one for each pair of banks
__shared__ float2 ranges[THREADS / 32];  // of warps

// A table's code in the lowest bits: intervals hold one edge at most.
__device__ __forceinline__ u32 entry(const Operands& p, u32 steps, float t) {
  if constexpr (DENSE) {
    u32 low = 0;
#pragma unroll
    for (int half = 1 << (BITS - 1); half; half /= 2)
      if (shared[low + half - 1].x < t) low += half;
    return __float_as_uint(shared[low].y);
  }
  const float place = BOUNDED ? fmaf(t, p.by, ROUNDER)
                              : fmaf(__saturatef(fmaf(t, p.inverse, 0.5f)), p.span, p.bottom);
  const float2 step = shared_pair(__float_as_uint(place) * (8 * COPIES) + steps);
  u32 code = __float_as_uint(step.y);
  if (step.x < t) code >>= 8;
  return code;
}

__device__ __forceinline__ u32 integer(float t, float offset) {
  if constexpr (OFFSET == FLOAT_ZERO) t = plus(t, offset);
  const float zero = OFFSET == INTEGER_ZERO ? offset : 0.0f;
  t = fminf(fmaxf(t, LOW - zero), HIGH - zero);
  float whole = __fadd_rn(t, ROUNDER);
  if constexpr (OFFSET == INTEGER_ZERO) whole = __fadd_rn(whole, zero);
  return __float_as_uint(whole);
}

// COUNT fields, WIDTH bits each, of the first `values`.
template <int COUNT>
__device__ __forceinline__ u32 packed(const Operands& p, u32 steps, const float* t, const u32* tops,
                                      float offset, int values) {
  u32 word = 0;
  if constexpr (KIND == MINIFLOAT && BITS == 8 && HAS_FP8) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) word |= fp8_pair(t[i], t[i + 1]) << 8 * i;
  } else if constexpr (KIND == MINIFLOAT) {
#pragma unroll
    for (int i = COUNT - 1; i >= 0; i--)
      word = BYTE ? word << 8 | tops[i] >> (32 - BITS) : __funnelshift_l(tops[i], word, BITS);
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      u32 field = KIND == LOOKUP ? entry(p, steps, t[i]) : integer(t[i], offset);
      if (!WHOLE && i >= values) field = 0;  // the code of zero may be another
      word = __funnelshift_r(word, field, WIDTH);
    }
    word >>= 32 - COUNT * WIDTH;
  }
  return word;
}

__device__ __forceinline__ void put(const Operands& p, const Run& run, const Values& x, const Factors& f,
                                    u32 steps) {
  // (A table may have an edge right above zero, so that what is taken for zero must be that before.)
  constexpr bool ONE_PRODUCT = KIND != LOOKUP;
  float t[RUN];
#pragma unroll
  for (int i = 0; i < RUN; i++) {
    t[i] = x[i];
    if constexpr (SATURATES) t[i] = t[i] == t[i] ? fminf(fmaxf(t[i], -MAX), MAX) : 0.0f;
    if constexpr (OFFSET == BIAS) t[i] = plus(t[i], -f.offset);
  }
  if (f.before != 1.0f) {
#pragma unroll
    for (int i = 0; i < RUN; i++) t[i] = times(t[i], f.before);
  }
#pragma unroll
  for (int i = 0; i < RUN; i++) {
    t[i] = ONE_PRODUCT ? times(t[i], f.reciprocal) : __fmul_rn(flush(t[i]), f.reciprocal);
    if (!WHOLE && i >= run.values) t[i] = 0;
  }
  u32 tops[RUN];  // minifloats, each in the highest bits
  if (PAIRS && f.before == 1.0f && f.reciprocal >= SMALLEST_PAIR && f.reciprocal <= LARGEST_PAIR) {
#pragma unroll
    for (int i = 0; i < RUN; i += 2) minifloats(x.words[i / 2], f.reciprocal, tops + i);
  } else if (KIND == MINIFLOAT) {
#pragma unroll
    for (int i = 0; i < RUN; i++) tops[i] = minifloat(t[i]);
  }
  u8* to = p.codes + run.byte;
  if constexpr ((WIDTH & (WIDTH - 1)) == 0) {
    constexpr int EACH = RUN < 32 / WIDTH ? RUN : 32 / WIDTH, WORDS = RUN / EACH;
    u32 words[WORDS];
#pragma unroll
    for (int w = 0; w < WORDS; w++)
      words[w] = packed<EACH>(p, steps, t + w * EACH, tops + w * EACH, f.offset, run.values - w * EACH);
    if (WHOLE ? run.bytes != 0 : run.bytes == RUN_BYTES && (size_t)to % RUN_BYTES == 0) {
      if constexpr (RUN_BYTES == 16) *(uint4*)to = *(uint4*)words;
      if constexpr (RUN_BYTES == 8) *(uint2*)to = *(uint2*)words;
      if constexpr (RUN_BYTES == 4) *(u32*)to = words[0];
      if constexpr (RUN_BYTES == 2) *(u16*)to = words[0];
      if constexpr (RUN_BYTES == 1) *to = words[0];
    } else {
#pragma unroll
      for (int i = 0; i < RUN_BYTES; i++)
        if (i < run.bytes) to[i] = words[i / 4] >> i % 4 * 8;
    }
  } else {
    constexpr int EACH = WIDTH == 3 ? 8 : 4, UNIT = RUN_BYTES % 4 == 0 ? 4 : RUN_BYTES % 2 == 0 ? 2 : 1;
    u32 words[RUN_BYTES / 4 + 1] = {};
#pragma unroll
    for (int first = 0; first < RUN; first += EACH) {
      const u32 part = packed<EACH>(p, steps, t + first, tops + first, f.offset, run.values - first);
      const int word = first * WIDTH / 32, shift = first * WIDTH % 32;
      words[word] |= part << shift;
      if (shift + EACH * WIDTH > 32) words[word + 1] |= part >> (32 - shift);
    }
    const bool whole = WHOLE ? run.bytes != 0 : run.bytes == RUN_BYTES && (size_t)to % UNIT == 0;
#pragma unroll
    for (int i = 0; i < RUN_BYTES; i++) {
      const u32 rest = words[i / 4] >> i % 4 * 8;
      if (whole) {
        if (UNIT == 4 && i % 4 == 0) *(u32*)(to + i) = rest;
        if (UNIT == 2 && i % 2 == 0) *(u16*)(to + i) = rest;
        if (UNIT == 1) to[i] = rest;
      } else if (!WHOLE && i < run.bytes) {
        to[i] = rest;
      }
    }
  }
}

// -- kernels -------------------------------------------------------------------------------------

// Where a lane's runs are: of the block of a block of threads; of all blocks, side by side; or, where
// scales are given, of a line. (From the end on: what was read to find scales may be in the cache yet.)
struct Place {
  Run run;
  u32 block;
  bool leads;

  static __device__ __forceinline__ Place of(const Operands& p, int r) {
    const u32 here = gridDim.x - 1 - blockIdx.x;
    if constexpr (!CALIBRATES) {
      const u32 line = here / p.tiles, i = (here % p.tiles * RUNS + r) * THREADS + threadIdx.x;
      const u32 last = p.count - 1, place = !last ? 0 : p.shift < 32 ? i >> p.shift : i / p.group;
      const u32 j = i - place * p.group, block = grid_line(p, line) * p.count + min(place, last);
      return {Run(p, line, place, j, p.group, place <= last && j < p.group), block, false};
    }
    const u32 i = (here * RUNS + r) * THREADS + threadIdx.x, group = max(GROUP, 1);
    const u32 runs = WHOLE && GROUP && !ACROSS ? GROUP : p.group;  // of a block
    const u32 j = GROUP ? i % group : r * THREADS + threadIdx.x, block = GROUP ? i / group : here;
    if constexpr (ACROSS != 0) {
      const u32 row = p.lines(block), height = p.rows(row), first = (row - height * p.c2) * p.e2;
      const u32 down = j / ACROSS, along = j % ACROSS, line = height * p.h2 + first + down;
      const bool inside = block < p.blocks && along < p.group && down < min(p.e2, p.h2 - first);
      return {Run(p, line, block - row * p.count, along, p.group, inside), block, inside && j == 0};
    }
    const bool inside = block < p.blocks && j < runs;
    const u32 line = WHOLE ? 0 : block / p.count, place = WHOLE ? block : block % p.count;
    return {Run(p, line, place, j, runs, inside), block, inside && j == 0};
  }
};

constexpr int RESIDENT = 1152;  // threads of a multiprocessor at the least, so 56 registers at the most

extern "C" __global__ void __launch_bounds__(THREADS, THREADS < RESIDENT ? RESIDENT / THREADS : 1)
    encode(const Operands p) {
  constexpr bool TOGETHER = CALIBRATES && GROUP == 0;
  const Upper upper(p);
  Seen seen;
  Values x[RUNS];
#pragma unroll
  for (int r = 0; r < RUNS; r++) x[r].load(p, Place::of(p, r).run);
  u32 steps = 0;
  if constexpr (KIND == LOOKUP && CODES) {
    for (u32 i = threadIdx.x; i < p.intervals * COPIES; i += THREADS) shared[i] = p.steps[i / COPIES];
    __syncthreads();
    steps = shared_address(shared) + threadIdx.x % COPIES * 8 + p.origin;
  }
  Factors f;
  if constexpr (TOGETHER) {
    Range range;
#pragma unroll
    for (int r = 0; r < RUNS; r++) {
      const Range other = range_of(x[r], Place::of(p, r).run.values);
      range.join(other.low, other.high);
    }
    range.exchange(32);
    if (threadIdx.x % 32 == 0) ranges[threadIdx.x / 32] = {range.low, range.high};
    __syncthreads();
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) range.join(ranges[w].x, ranges[w].y);
    f = calibrated(p, upper, range, Place::of(p, 0).block, threadIdx.x == 0, seen);
  }
#pragma unroll
  for (int r = 0; r < RUNS; r++) {
    const Place place = Place::of(p, r);
    if constexpr (!CALIBRATES) {
      if (p.seen) seen.is_bad |= !range_of(x[r], place.run.values).is_finite();
      f = given(p, upper, place.block);
    }
    if constexpr (CALIBRATES && !TOGETHER) {
      Range range = range_of(x[r], place.run.values);
      range.exchange(GROUP);
      f = calibrated(p, upper, range, place.block, place.leads, seen);
    }
    if constexpr (CODES) put(p, place.run, x[r], f, steps);
  }
  seen.tell(p);
}

// The scales and offsets of blocks of e2 lines, of h2 that follow each other: a lane takes its run of
// every line.
extern "C" __global__ void __launch_bounds__(THREADS) calibrate(const Operands p) {
  const u32 row = blockIdx.x / p.tiles, i = blockIdx.x % p.tiles * THREADS + threadIdx.x;
  const u32 place = i / max(GROUP, 1), j = i % max(GROUP, 1), first = row % p.c2 * p.e2;
  const u32 line = row / p.c2 * p.h2 + first, lines = min(p.e2, p.h2 - first);
  Run run(p, line, place, j, p.group, place < p.count && j < p.group);
  Range range;
  for (u32 l = 0; l < lines; l += RUNS) {
    Values x[RUNS];
#pragma unroll
    for (int r = 0; r < RUNS; r++, run.at += p.length)
      if (l + r < lines) x[r].load(p, run);
#pragma unroll
    for (int r = 0; r < RUNS; r++) {
      const Range other = range_of(x[r], l + r < lines ? run.values : 0);
      if (l + r < lines) range.join(other.low, other.high);
    }
  }
  range.exchange(GROUP);
  Seen seen;
  calibrated(p, Upper(p), range, row * p.count + place, place < p.count && j == 0, seen);
  seen.tell(p);
}

// The scale of the whole tensor: the largest magnitude of all, as the bits of a float32 (which are in
// order). The block of threads that is done last stores it, or, of two levels, the upper one.
extern "C" __global__ void __launch_bounds__(THREADS) largest(const Operands p) {
  Range range;
  const u32 runs = (p.length + RUN - 1) / RUN;
  const u32 step = gridDim.x * THREADS;
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < runs; i += step * RUNS) {
    Values x[RUNS];
#pragma unroll
    for (int r = 0; r < RUNS; r++) x[r].load(p, Run(p, 0, 0, i + r * step, runs, i + r * step < runs));
#pragma unroll
    for (int r = 0; r < RUNS; r++) range.join(0, range_of(x[r], RUN).high);  // zeros past the end
  }
  range.exchange(32);
  if (threadIdx.x % 32 == 0) atomicMax(p.work, __float_as_uint(range.high));
  __threadfence();
  __syncthreads();
  if (threadIdx.x != 0 || atomicAdd(p.work + 1, 1) != gridDim.x - 1) return;
  __threadfence();
  range.high = __uint_as_float(atomicMax(p.work, 0));
  Seen seen;
  if (!TWO_LEVELS) {
    calibrated(p, Upper(p), range, 0, true, seen);
  } else {
    seen.is_bad = !range.is_finite();
    const float ideal = flush(__fdiv_rn(flush(range.high), p.range));
    *(float*)p.scales = fminf(fmaxf(__fdiv_rn(ideal, p.scale_max), TINY), MAX);
  }
  seen.tell(p);
}
