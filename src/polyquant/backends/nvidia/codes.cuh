// What the kernels of this folder share: copies of lines to shared memory, stored numbers, and codes
// as pairs of numbers. It stands before each of them; mma.cu says what the names mean.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

enum { SIGNED = 0, UNSIGNED = 1, MINIFLOAT = 2, E4M3 = 3, E5M2 = 4, LOOKUP = 5 };
enum { F32_T = 0, F16_T = 1, BF16_T = 2, UE8M0_T = 3, UE4M3_T = 4, U8_T = 5 };
enum { NO_OFFSET = 0, INTEGER_ZERO = 1, FLOAT_ZERO = 2, BIAS = 3 };

constexpr int ROWS = 16 * RT, COLUMNS = 8 * NT, GROUPS = CHUNK / 32;
constexpr int CODE_BYTES = CHUNK * BITS / 8;
// Rows of a quad's loads lie in other banks: an odd number of 16 bytes apart, or of 32 where it loads 8 each.
constexpr int CODE_PITCH = CODE_BYTES + (WIDE || BITS == 4 || (BITS < 8 && CODE_BYTES / 16 % 2 == 0) ? 16 : 32);
constexpr bool IN_BLOCKS = BLOCK != 0;
constexpr int PER_CHUNK = !IN_BLOCKS ? 0 : (BLOCK >= CHUNK ? 1 : CHUNK / BLOCK);
constexpr bool NATURAL = KIND == E4M3 || KIND == E5M2 || KIND == LOOKUP;
constexpr bool HALVES = BLOCK == 16;  // a quad's 32 values hold two blocks: threads 0, 1 and 2, 3
constexpr bool SUMS_X = OFFSET == FLOAT_ZERO || OFFSET == BIAS;
constexpr int LUT_COPIES = 32;  // one for each bank
#ifndef LUT_STEP
#define LUT_STEP 128  // bytes from one pair of a table to the next; 256: so that a code is a byte of its address
#endif
constexpr u32 LUT_AT = 1024;  // where shared memory begins: what lies before is the driver's
constexpr int WORKERS = 32 * WN * WK, THREADS = WORKERS + 128 * (WIDE > 0);  // wgmma.cu's last ones copy x

__host__ __device__ constexpr int size_of(int type) {
  return type == F32_T ? 4 : type == F16_T || type == BF16_T ? 2 : 1;
}
__host__ __device__ constexpr int padded(int bytes) { return (bytes + 15) / 16 * 16; }

constexpr int SCALE_BYTES = PER_CHUNK * size_of(SCALE);
constexpr int OFFSET_BYTES = OFFSET == NO_OFFSET ? 0 : PER_CHUNK * size_of(OFFSET_TYPE);
constexpr int SCALE_PITCH = padded(SCALE_BYTES), OFFSET_PITCH = padded(OFFSET_BYTES);
constexpr int WARP_STAGE = ROWS * (CODE_PITCH + SCALE_PITCH + OFFSET_PITCH);
constexpr int LUT_BYTES = KIND == LOOKUP ? 256 * LUT_STEP : 0;

// -- copies ---------------------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}

// PIECE bytes to shared memory.
template <int PIECE>
__device__ __forceinline__ void copy(u32 to, const u8* from) {
  if constexpr (PIECE == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else if constexpr (PIECE == 8 || PIECE == 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(PIECE)
                 : "memory");
  } else if constexpr (PIECE == 2) {  // too short for cp.async
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(*(const u16*)from) : "memory");
  } else {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "h"((u16)*from) : "memory");
  }
}

// As many zeros where the source lies past its end.
template <int PIECE>
__device__ __forceinline__ void copy(u32 to, const u8* from, bool inside) {
  if constexpr (PIECE == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(inside ? 16 : 0) : "memory");
  } else if constexpr (PIECE == 8 || PIECE == 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(PIECE),
                 "r"(inside ? PIECE : 0) : "memory");
  } else if constexpr (PIECE == 2) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(inside ? *(const u16*)from : (u16)0)
                 : "memory");
  } else {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "h"(inside ? (u16)*from : (u16)0) : "memory");
  }
}

// An address that the compiler holds, and does not find anew each time.
__device__ __forceinline__ void hold(const u8*& address) { asm volatile("" : "+l"(address)); }

// BYTES of each of a warp's rows: a run of lines of something.
template <int BYTES, int PITCH, int PIECE>
struct Lines {
  static constexpr int PIECES = BYTES < PIECE ? 1 : BYTES / PIECE, ALL = ROWS * PIECES;
  // Lane by lane along the lines: after PERIOD steps of a warp, which are APART rows, it is where it was.
  static constexpr int EVEN = PIECES & -PIECES, PERIOD = PIECES / EVEN, APART = EVEN > 32 ? 1 : 32 / EVEN;
  static constexpr bool IN_STEP = EVEN <= 32 && PERIOD < 8;
  static constexpr int STEPS = (ROWS + APART - 1) / APART;
  static constexpr bool ONCE = ALL <= 32;  // a lane copies one piece, and always the same one of a line
  const u8* lines;  // the first of all
  const u8* mine[IN_STEP ? PERIOD : 1];  // what the lane copies first
  long long stride;
  int first, last, rows_per, line;  // rows of the weight; how many have one line; bytes of a line

  __device__ __forceinline__ Lines(const u8* lines, long long stride, int first, int n, int rows_per,
                                   int line, int lane)
      : lines(lines), stride(stride), first(first), last(n - 1), rows_per(rows_per), line(line) {
    if constexpr (ONCE) {
      mine[0] = lines + min(first + lane / PIECES, last) / rows_per * stride + lane % PIECES * PIECE;
    } else if constexpr (IN_STEP) {
#pragma unroll
      for (int j = 0; j < PERIOD; j++)
        mine[j] = lines + (first + (lane + 32 * j) / PIECES) * stride + (lane + 32 * j) % PIECES * PIECE;
    }
  }

  __device__ __forceinline__ void hold_addresses() {
    if constexpr (ONCE || IN_STEP)
#pragma unroll
      for (int j = 0; j < (ONCE ? 1 : PERIOD); j++) hold(mine[j]);
  }

  // Those from byte `start` of the lines on; zeros past the ends.
  __device__ __forceinline__ void fetch(u32 to, int start, int lane) const {
    if constexpr (ONCE) {
      const int row = lane / PIECES, byte = lane % PIECES * PIECE;
      if (lane < ALL) copy<PIECE>(to + row * PITCH + byte, mine[0] + start, start + byte < line);
    } else if (IN_STEP && rows_per == 1) {
      const bool all = ROWS % APART == 0 && first + ROWS <= last + 1 && start + BYTES <= line;
#pragma unroll
      for (int j = 0; j < PERIOD; j++) {
        const int row = (lane + 32 * j) / PIECES, byte = (lane + 32 * j) % PIECES * PIECE;
        const u8* from = mine[j] + start;
        const u32 there = to + row * PITCH + byte;
        if (all) {
#pragma unroll
          for (int i = 0; i < STEPS; i++, from += APART * stride) copy<PIECE>(there + i * APART * PITCH, from);
        } else {
          const bool inside = start + byte < line;
#pragma unroll
          for (int i = 0; i < STEPS; i++, from += APART * stride)
            if (ROWS % APART == 0 || row + i * APART < ROWS)
              copy<PIECE>(there + i * APART * PITCH, from, inside && first + row + i * APART <= last);
        }
      }
    } else {
      for (int i = lane; i < ALL; i += 32) {
        const int row = i / PIECES, byte = i % PIECES * PIECE;
        const long long at = min(first + row, last) / rows_per * stride + start + byte;
        copy<PIECE>(to + row * PITCH + byte, lines + at, start + byte < line);
      }
    }
  }
};

// -- numbers --------------------------------------------------------------------------------------

template <int TYPE>
__device__ __forceinline__ float number(const u8* p) {
  if constexpr (TYPE == F32_T) return *(const float*)p;
  if constexpr (TYPE == F16_T) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(*(const u16*)p));
    return f;
  }
  if constexpr (TYPE == BF16_T) return __uint_as_float((u32)(*(const u16*)p) << 16);
  if constexpr (TYPE == UE8M0_T) {  // 0 is 2^-127, and 255, infinity here, is NaN
    u32 bits;
    asm("max.u32 %0, %1, %2;" : "=r"(bits) : "r"((u32)*p << 23), "n"(0x400000));
    return fmaf(__uint_as_float(bits), 0.0f, __uint_as_float(bits));
  }
  if constexpr (TYPE == UE4M3_T) {
    float f;
    asm("{.reg .b32 pair; .reg .b16 low, high; cvt.rn.f16x2.e4m3x2 pair, %1;"
        " mov.b32 {low, high}, pair; cvt.f32.f16 %0, low;}" : "=f"(f) : "h"((u16)*p));
    return f;
  }
  return (float)*p;
}

__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  u32 d;
#if F16
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#endif
  return d;
}

// Two float32 as f16 or bf16, the low one first.
template <bool HALF>
__device__ __forceinline__ u32 pack_as(float low, float high) {
  u32 d;
  if constexpr (HALF) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  }
  return d;
}

// As the fragment's type, which holds them exactly (a table's entries: rounded).
__device__ __forceinline__ u32 pack(float low, float high) { return pack_as<F16>(low, high); }

// A pair of f16 as a pair of the fragment's type.
__device__ __forceinline__ u32 from_f16(u32 pair) {
#if F16
  return pair;
#else
  float low, high;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
      : "=f"(low), "=f"(high) : "r"(pair));
  return pack(low, high);
#endif
}

constexpr u32 ONE2 = F16 ? 0x3C003C00u : 0x3F803F80u;
constexpr u32 MINUS_ZERO2 = 0x80008000u;
constexpr u32 both(u32 half) { return half << 16 | half; }

// -- codes ----------------------------------------------------------------------------------------

constexpr u32 SIGN = KIND == SIGNED ? 1u << (BITS - 1) : 0;
// 128 + u in bf16 (1024 + u in f16) is this with u in the lowest bits: for up to 7 (8) bits.
constexpr u32 MAGIC = F16 ? 0x6400u : 0x4300u;
constexpr bool BY_MAGIC = F16 || BITS < 8;

// What takes MAGIC and the sign or zero point away again: -(128 + zero) in both halves.
__device__ __forceinline__ u32 subtrahend(u32 zero) { return both(0x8000u | MAGIC) + both(1) * zero; }

// a & mask ^ b in one instruction: the compiler makes it two where it knows both constants.
__device__ __forceinline__ u32 and_xor(u32 a, u32 mask, u32 b) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(d) : "r"(a), "r"(mask), "r"(b));
  return d;
}

// Bits of a where the mask has them, else of b.
__device__ __forceinline__ u32 merge(u32 a, u32 b, u32 mask) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xE2;" : "=r"(d) : "r"(a), "r"(mask), "r"(b));
  return d;
}

constexpr u32 MASK = both((1u << BITS) - 1);

// A pair of integers or of small minifloats, one in the lowest bits of each half.
__device__ __forceinline__ u32 from_fields(u32 f, u32 magic, u32 minus) {
  if constexpr (KIND == MINIFLOAT) {
    // Exponent and mantissa in place are the number times a power of two, subnormals too.
    constexpr int E = KIND == MINIFLOAT ? BITS - 1 - MANTISSA : 1, B = (1 << (E - 1)) - 1;
    constexpr u32 POWER = F16 ? (30u - B) << 10 : (254u - B) << 7;
    constexpr int UP = (F16 ? 10 : 7) - MANTISSA;
    constexpr u32 REST = both((1u << (BITS - 1)) - 1);
    return fma2((f & both(1u << (BITS - 1))) << (16 - BITS) | (f & REST) << UP, both(POWER), MINUS_ZERO2);
  } else {
    return fma2(and_xor(f, MASK, magic), ONE2, minus);
  }
}

// Two's complement of 8 bits to bf16: 128 + the lower seven, less 128 or 256, whose bf16 differ in bit 7.
constexpr bool SIGNED_BYTES = KIND == SIGNED && BITS == 8 && !F16 && OFFSET != INTEGER_ZERO;
__device__ __forceinline__ u32 from_bytes(u32 pair) {
  return fma2(and_xor(pair, both(0x7F), both(MAGIC)), ONE2, and_xor(pair, both(0x80), both(0x8000u | MAGIC)));
}

// A word of a bank of the table of pairs, by a multiplication: the units of sums are the less busy ones.
__device__ __forceinline__ u32 shared_word(u32 bank, u32 i) {
  u32 d;
  asm("{.reg .b32 at; mad.lo.u32 at, %2, %3, %1; ld.shared.b32 %0, [at];}"
      : "=r"(d) : "r"(bank), "r"(i), "n"(4 * LUT_COPIES));
  return d;
}

// The same for byte I of a word of codes, where that byte is one of the address (LUT_STEP).
template <int I>
__device__ __forceinline__ u32 shared_word_of(u32 lut, u32 codes) {
  u32 d;
  asm("{.reg .b32 at; prmt.b32 at, %1, %2, %3; ld.shared.b32 %0, [at+%4];}"
      : "=r"(d) : "r"(codes), "r"((lut & ~0xFFFFFFu) | threadIdx.x % 32 * 4), "n"(0x7604 | I << 4), "n"(LUT_AT));
  return d;
}

// The 4 pairs of numbers of 8 codes of 4 bits (w0) or of 8 (w0, w1): the pairs (i, i + 4), neighbours
// where NATURAL. `magic`: MAGIC and SIGN in both halves; `minus`: see subtrahend; `zero`: as a
// float32, for 8-bit codes.
__device__ __forceinline__ void numbers_of(u32 w0, u32 w1, u32 magic, u32 minus, float zero,
                                           const u32* lut, u32* a) {
  if constexpr (KIND == LOOKUP && LUT_STEP == 256) {
    const u32 at = shared_address(lut);
    a[0] = shared_word_of<0>(at, w0), a[1] = shared_word_of<1>(at, w0);
    a[2] = shared_word_of<2>(at, w0), a[3] = shared_word_of<3>(at, w0);
  } else if constexpr (KIND == LOOKUP) {
    const u32 bank = shared_address(lut) + threadIdx.x % 32 * 4;
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = shared_word(bank, __byte_perm(w0, 0, 0x4440 | i));
  } else if constexpr (KIND == E4M3) {
    const u32 words[2] = {w0, w1};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 pair;
      u16 codes = (u16)(words[i / 2] >> 16 * (i % 2));
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(codes));
      a[i] = from_f16(pair);
    }
  } else if constexpr (KIND == E5M2) {  // the upper byte of an f16
    const u32 words[2] = {w0, w1};
#pragma unroll
    for (int i = 0; i < 4; i++)
      a[i] = from_f16(__byte_perm(words[i / 2], 0, i % 2 ? 0x3424 : 0x1404));
  } else if constexpr (BITS == 4) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = fma2(and_xor(w0 >> 4 * i, MASK, magic), ONE2, minus);
  } else if constexpr (BY_MAGIC) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      a[i] = fma2(and_xor(__byte_perm(w0, w1, i | (4 + i) << 8), MASK, magic), ONE2, minus);
  } else {  // 8 bits to bf16: 2^23 + u in float32 is 0x4B000000 with u in the lowest bits
    w0 ^= SIGN * 0x01010101u;
    w1 ^= SIGN * 0x01010101u;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float low = __uint_as_float(__byte_perm(w0, 0x4B000000u, 0x7440 | i));
      float high = __uint_as_float(__byte_perm(w1, 0x4B000000u, 0x7440 | i));
      a[i] = pack(low - zero, high - zero);
    }
  }
}

// The same of codes of 2, 4 or 8 bits at a thread's place in a group's bytes; `word`: those of 4 bits,
// loaded already.
__device__ __forceinline__ void decode(const u8* line, int t, u32 word, u32 magic, u32 minus, float zero,
                                       const u32* lut, u32* a) {
  if constexpr (BITS == 4) {
    numbers_of(word, 0, magic, minus, zero, lut, a);
  } else if constexpr (BITS == 8) {
    const uint2 w = *(const uint2*)(line + 8 * t);
    numbers_of(w.x, w.y, magic, minus, zero, lut, a);
  } else {
    const u32 w = BITS == 2 ? __byte_perm(*(const u16*)(line + 2 * t), 0, 0x4140) : 0;
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = from_fields(w >> 2 * i, magic, minus);
  }
}

// The words of 4-bit codes of two groups, of rows g and g + 8 each: ldmatrix hands thread t of a quad
// its word t of 16 bytes.
__device__ __forceinline__ void load_words(const u8* mine, u32 (*words)[2]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0][0]), "=r"(words[0][1]), "=r"(words[1][0]), "=r"(words[1][1])
               : "r"(shared_address(mine)) : "memory");
}

// An entry of the table: e2m1 is looked up like one, which is quicker than its bits.
__device__ __forceinline__ float entry_of(const float* table, int i) {
  if constexpr (MANTISSA != 1) return table[i];
  const int exponent = i >> 1 & 3;
  const float size = exponent == 0 ? (i & 1) * 0.5f : (1 + (i & 1) * 0.5f) * (1 << exponent) * 0.5f;
  return i < 8 ? size : -size;
}

// Pairs of entries, LUT_COPIES times, so that each lane reads its own bank. For f16 they are scaled
// to use its whole range (in wgmma.cu, whose scales multiply them, to about 1 where they are far from
// it); returns what undoes that.
__device__ __forceinline__ float build_lut(u32* lut, const float* table) {
  float undo = 1.0f;
  if (LUT_STEP == 256 && (shared_address(lut) & 0xFFFFFF) != LUT_AT) __trap();
#if F16
  float top = 0.0f;
  for (int i = 0; i < 16; i++) top = fmaxf(top, fabsf(entry_of(table, i)));
  int exponent = (int)(__float_as_uint(top) >> 23) - 127;  // 2^exponent <= top < 2^(exponent + 1)
  const int wanted = !WIDE ? 14 : exponent >= 0 && exponent < 8 ? exponent : 0;
  int up = min(max(wanted - exponent, -126), 126);
  float by = __uint_as_float((u32)(127 + up) << 23);
  undo = __uint_as_float((u32)(127 - up) << 23);
#else
  float by = 1.0f;
#endif
  constexpr int EACH = LUT_COPIES / 4, ENTRIES = THREADS / EACH;  // that are written at once
  for (int first = threadIdx.x / EACH % 16; first < 16; first += ENTRIES) {
    const float low = entry_of(table, first) * by;
#pragma unroll 4
    for (int second = threadIdx.x / EACH / 16; second < 16; second += max(1, ENTRIES / 16)) {
      const u32 pair = pack(low, entry_of(table, second) * by);
      ((uint4*)lut)[(second * 16 + first) * (LUT_STEP / 16) + threadIdx.x % EACH] = make_uint4(pair, pair, pair, pair);
    }
  }
  return undo;
}

struct Operands {
  const u8* x;             // (batch, M, XK) bf16 or f16
  const u8* codes;         // lines of codes, code_stride bytes apart: N of them, or K in mma_n.cu
  const u8* scales;        // lines of scales, scale_stride bytes apart; BLOCK 0: one a line
  const u8* offsets;
  const float* tensor_scale;
  const float* table;
  void* y;                 // (batch, M / PLANES, N)
  long long code_stride, scale_stride, offset_stride;
  long long x_batch, code_batch, scale_batch, offset_batch;  // bytes between products of a batch
  int m, n, k, xk, chunks, code_line, scale_line, offset_line, block_rows, m_tiles;
};

// Where a block of threads is: along lines of the weight, and among tiles of rows of x of all products.
// Of more tiles than the grid's axis y has room for (BATCHED 2) the axes change places.
__device__ __forceinline__ int line_block() { return BATCHED == 2 ? blockIdx.y : blockIdx.x; }
__device__ __forceinline__ int row_tile() { return BATCHED == 2 ? blockIdx.x : blockIdx.y; }

// One product of a batch: `y` counts tiles of its rows of x, then products.
__device__ __forceinline__ Operands of_batch(const Operands& p, int y) {
  if constexpr (!BATCHED) return p;
  Operands one = p;
  const long long batch = y / p.m_tiles;
  one.x += batch * p.x_batch;
  one.codes += batch * p.code_batch;
  one.scales += batch * p.scale_batch;
  one.offsets += batch * p.offset_batch;
  one.y = (u8*)p.y + batch * (p.m / PLANES) * p.n * (OUT == 0 ? 4 : 2);
  return one;
}
__device__ __forceinline__ int first_row(const Operands& p, int y) {
  return (BATCHED ? y % p.m_tiles : y) * COLUMNS;
}

// A warp's rows of the weight: chunks of codes, and the scales and offsets that belong to them.
struct Weight {
  Lines<CODE_BYTES, CODE_PITCH, CODE_PIECE> codes;
  Lines<SCALE_BYTES, SCALE_PITCH, SCALE_PIECE> scales;
  Lines<OFFSET_BYTES, OFFSET_PITCH, OFFSET_PIECE> offsets;

  __device__ __forceinline__ Weight(const Operands& p, int first, int lane)
      : codes(p.codes, p.code_stride, first, p.n, 1, p.code_line, lane),
        scales(p.scales, p.scale_stride, first, p.n, p.block_rows, p.scale_line, lane),
        offsets(p.offsets, p.offset_stride, first, p.n, p.block_rows, p.offset_line, lane) {}

  __device__ __forceinline__ void hold_addresses() {
    codes.hold_addresses();
    scales.hold_addresses();
    offsets.hold_addresses();
  }

  __device__ __forceinline__ void fetch(u32 to, int chunk, int lane) const {
    codes.fetch(to, chunk * CODE_BYTES, lane);
    const int block = BLOCK >= CHUNK ? chunk / max(1, BLOCK / CHUNK) : chunk * PER_CHUNK;
    if constexpr (IN_BLOCKS) scales.fetch(to + ROWS * CODE_PITCH, block * size_of(SCALE), lane);
    if constexpr (OFFSET != NO_OFFSET)
      offsets.fetch(to + ROWS * (CODE_PITCH + SCALE_PITCH), block * size_of(OFFSET_TYPE), lane);
  }
};

// A chunk of the rows of x that a block of threads multiplies, copied by COPIERS threads to wherever
// `place` says that 16 bytes of a row go.
template <int COPIERS>
struct Activations {
  static constexpr int PIECES = CHUNK / 8;
  static constexpr bool IN_STEP = X_ROWS > 1 && COPIERS % PIECES == 0;  // a thread keeps its place along the row
  static constexpr int APART = IN_STEP ? COPIERS / PIECES : 1;
  const u8* mine;
  int rows, row, piece, xk;

  __device__ __forceinline__ Activations(const Operands& p, int first_m, int rows, int thread)
      : rows(rows), row(IN_STEP ? thread / PIECES : 0), piece(IN_STEP ? thread % PIECES : thread),
        xk(p.xk) {
    mine = p.x + ((long long)(first_m + row) * xk + piece * 8) * 2;
  }

  template <class Place>
  __device__ __forceinline__ void fetch(u32 to, int chunk, Place place) const {
    const u8* from = mine + (long long)chunk * (CHUNK * 2);
    const int k = chunk * CHUNK + piece * 8, step = APART * xk * 2;
    if constexpr (IN_STEP) {
      if (rows == COLUMNS && (chunk + 1) * CHUNK <= xk) {
#pragma unroll
        for (int i = 0; i * APART < COLUMNS; i++, from += step)
          if (COLUMNS % APART == 0 || row + i * APART < COLUMNS)
            copy<16>(to + place(row + i * APART, piece), from);
        return;
      }
#pragma unroll
      for (int i = 0; i * APART < COLUMNS; i++, from += step) {
        if (i * APART >= rows) break;
        if (row + i * APART < rows) copy<16>(to + place(row + i * APART, piece), from, k < xk);
      }
    } else if constexpr (X_ROWS == 1) {
#pragma unroll
      for (int i = 0; i < PIECES; i += COPIERS)
        if (PIECES % COPIERS == 0 || piece + i < PIECES)
          copy<16>(to + place(0, piece + i), from + i * 16, k + i * 8 < xk);
    } else {
      for (int r = 0; r < rows; r++, from += step)
#pragma unroll
        for (int i = 0; i < PIECES; i += COPIERS)
          if (piece + i < PIECES)
            copy<16>(to + place(r, piece + i), from + i * 16, k + i * 8 < xk);
    }
  }
};

// -- scales as bf16 ------------------------------------------------------------------------------

// The scales and offsets of one row for a chunk, in registers.
template <int BYTES>
struct Numbers {
  u32 words[(BYTES + 3) / 4 + 1];

  __device__ __forceinline__ void load(const u8* from) {
    if constexpr (BYTES % 16 == 0) {
#pragma unroll
      for (int i = 0; i < BYTES / 16; i++) *(uint4*)(words + 4 * i) = ((const uint4*)from)[i];
    } else if constexpr (BYTES % 8 == 0) {
#pragma unroll
      for (int i = 0; i < BYTES / 8; i++) *(uint2*)(words + 2 * i) = ((const uint2*)from)[i];
    } else {
#pragma unroll
      for (int i = 0; i < (BYTES + 3) / 4; i++) words[i] = ((const u32*)from)[i];
    }
  }

  // Of each two bytes the second comes where the first is.
  __device__ __forceinline__ void second() {
#pragma unroll
    for (int i = 0; i < (BYTES + 3) / 4; i++) words[i] >>= 8;
  }

  // The bits of number i, of SIZE bytes.
  template <int SIZE>
  __device__ __forceinline__ u32 at(int i) const {
    if constexpr (SIZE == 4) return words[i];
    constexpr int EACH = SIZE == 4 ? 1 : 4 / SIZE;
    return words[i / EACH] >> i % EACH * (8 * SIZE) & ((1ull << 8 * SIZE) - 1);
  }
};

// Number i, as a float32.
template <int TYPE, int BYTES>
__device__ __forceinline__ float number(const Numbers<BYTES>& numbers, int i) {
  if constexpr (TYPE == UE8M0_T) {  // two at once, as bf16
    u32 two = __vmaxu2(__byte_perm(numbers.words[i / 4], 0, i % 4 < 2 ? 0x1404 : 0x3424) >> 1, both(0x40));
    asm("fma.rn.bf16x2 %0, %0, %1, %0;" : "+r"(two) : "r"(0));
    return __uint_as_float(i % 2 ? two & 0xFFFF0000u : two << 16);
  }
  const u32 bits = numbers.template at<size_of(TYPE)>(i);
  return number<TYPE>((const u8*)&bits);
}

// The number of pair q of the 32 values of group c: see pair_of in wgmma.cu.
template <int SIZE, int BYTES>
__device__ __forceinline__ u32 of_values(const Numbers<BYTES>& numbers, int c, int q) {
  return numbers.template at<SIZE>(HALVES ? 2 * c + q / 2 : BLOCK >= CHUNK ? 0 : c * 32 / BLOCK);
}

// A scale twice, as the fragment's type.
__device__ __forceinline__ u32 scale_pair(u32 bits) {
  if constexpr (SCALE == (F16 ? F16_T : BF16_T)) return bits * 0x10001u;
  if constexpr (SCALE == UE8M0_T && !F16) {
    const u32 two = __vmaxu2(bits * 0x800080u, both(0x40));  // 0 is 2^-127
    return fma2(two, 0, two);                                 // 255, infinity here, is NaN
  }
  const float s = number<SCALE>((const u8*)&bits);
  return pack(s, s);
}

// -- products of a warp ---------------------------------------------------------------------------

#if F16
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#endif

__device__ __forceinline__ void mma(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm(MMA " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// All threads but those that only copy wait for each other.
__device__ __forceinline__ void sync_workers() {
  asm volatile("bar.sync 0, %0;" ::"n"(WORKERS) : "memory");
}

// What the kernel before wrote may be read from here on, and the next one may begin. Codes and numbers
// of a weight are read before: see multiply in torch's mma.py.
__device__ __forceinline__ void follow() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// The warps of a slice of k wait for each other.
__device__ __forceinline__ void sync_slice(int slice) {
  if constexpr (WN == 1) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(slice + 1), "n"(32 * WN) : "memory");
  }
}

// After the last of `count` chunks: slices that have one fewer wait for each other once more, since
// compute-sanitizer's racecheck orders accesses of two warps by how often each has waited.
__device__ __forceinline__ void even_out(int slice, int count, int chunks) {
  const int most = (chunks - (int)blockIdx.z * WK + WK * KC - 1) / (WK * KC);
  if (WN > 1 && count < most) sync_slice(slice);
}

// -- sums -----------------------------------------------------------------------------------------

// The sums of one block, scaled, into the sums of all: rows g and g + 8.
__device__ __forceinline__ void close_block(float (*acc)[4], const float (*d)[4], const float (*sum_x)[2],
                                            const float* s, const float* o) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int j = 0; j < NT; j++) {
#pragma unroll
      for (int c = 0; c < (X_ROWS == 1 ? 1 : 2); c++) {  // of one row of x only column 0 counts
        float whole = d[j][2 * half + c];
        float& to = acc[j][2 * half + c];
        if constexpr (OFFSET == FLOAT_ZERO) whole = __fsub_rn(whole, __fmul_rn(o[half], sum_x[j][c]));
        if constexpr (OFFSET == BIAS) {
          to += __fadd_rn(__fmul_rn(whole, s[half]), __fmul_rn(o[half], sum_x[j][c]));
        } else {
          to = fmaf(whole, s[half], to);
        }
      }
    }
  }
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// Four numbers in the shared memory of a block of threads of the cluster.
__device__ __forceinline__ float4 peer(const float* p, int rank) {
  if constexpr (KC == 1) return *(const float4*)p;
  u32 there;
  float4 f;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(f.x), "=f"(f.y), "=f"(f.z), "=f"(f.w) : "r"(there) : "memory");
  return f;
}

// A warp's sums of 16 rows to shared memory, by slice, column and row.
constexpr int SUMS_LINE = ROWS * WN + 4;  // floats: a warp's stores go to 32 banks
__device__ __forceinline__ void put_sums(float* sums, const float (*acc)[4], int slice, int row,
                                         int m_here, int lane) {
#pragma unroll
  for (int j = 0; j < NT; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int column = 8 * j + lane % 4 * 2 + i % 2;
      if (column < m_here)
        sums[(slice * COLUMNS + column) * SUMS_LINE + row + lane / 4 + i / 2 * 8] = acc[j][i];
    }
}

// Up to four neighbours of y, at once where they lie at whole fours.
__device__ __forceinline__ void put(void* y, long long at, const float* f, int count, bool whole) {
#if OUT == 0
  float* to = (float*)y + at;
  if (whole) {
    *(float4*)to = make_float4(f[0], f[1], f[2], f[3]);
    return;
  }
  for (int j = 0; j < 4; j++)
    if (j < count) to[j] = f[j];
#else
  const u32 low = pack_as<OUT == 1>(f[0], f[1]), high = pack_as<OUT == 1>(f[2], f[3]);
  u16* to = (u16*)y + at;
  if (whole) {
    *(uint2*)to = make_uint2(low, high);
    return;
  }
  for (int j = 0; j < 4; j++)
    if (j < count) to[j] = (u16)((j < 2 ? low : high) >> j % 2 * 16);
#endif
}

// The scale of a row of the weight that has one for all of k, and what scales the whole.
__device__ __forceinline__ float scale_of_row(const Operands& p, int n) {
  if constexpr (IN_BLOCKS) return 1.0f;
  n = min(n, p.n - 1);
  return number<SCALE>(p.scales + (p.block_rows == 1 ? n : n / p.block_rows) * p.scale_stride);
}
__device__ __forceinline__ float scale_of_all(const Operands& p, float undo) {
  return undo * (p.tensor_scale ? *p.tensor_scale : 1.0f);
}

// Asks for what `finish` wants of 16 rows to come as far as to the L2 cache.
__device__ __forceinline__ void announce_scales(const Operands& p, int first) {
  auto announce = [](const void* number) { asm volatile("prefetch.global.L2 [%0];" ::"l"(number)); };
  if (p.tensor_scale) announce(p.tensor_scale);
  if constexpr (!IN_BLOCKS) announce(p.scales + min(first, p.n - 1) / p.block_rows * p.scale_stride);
}

// The slices of a cluster together, in order, scaled, and out: each block of threads its share.
__device__ __forceinline__ void finish(const Operands& p, const float* sums, int first_m, int m_here,
                                       float undo) {
  constexpr int QUADS = ROWS * WN / 4;  // of rows
  static_assert(WORKERS % QUADS == 0, "a thread keeps to its rows");
  const int thread = threadIdx.x + blockIdx.z * WORKERS, row = thread % QUADS * 4;
  const int n = line_block() * (ROWS * WN) + row;
  const float whole = scale_of_all(p, undo);
  float scales[4];
#pragma unroll
  for (int j = 0; j < 4; j++) scales[j] = scale_of_row(p, n + j);
  if constexpr (KC > 1) {
    cluster_sync();
  } else {
    sync_workers();
  }
#pragma unroll 2
  for (int column = thread / QUADS; column < m_here / PLANES; column += WORKERS * KC / QUADS) {
    float y[4] = {};
#pragma unroll
    for (int plane = PLANES - 1; plane >= 0; plane--) {  // the smallest first
      float one[4] = {};
#pragma unroll
      for (int s = 0; s < WK * KC; s++) {
        const float4 f = peer(sums + (s % WK * COLUMNS + column * PLANES + plane) * SUMS_LINE + row, s / WK);
        one[0] += f.x, one[1] += f.y, one[2] += f.z, one[3] += f.w;
      }
#pragma unroll
      for (int j = 0; j < 4; j++) y[j] += one[j];
    }
    if (n >= p.n) continue;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if constexpr (!IN_BLOCKS) y[j] *= scales[j];
      y[j] *= whole;
    }
    put(p.y, (long long)(first_m / PLANES + column) * p.n + n, y, min(p.n - n, 4), p.n % 4 == 0);
  }
  if constexpr (KC > 1) cluster_sync();  // none leaves while another reads its sums
}
