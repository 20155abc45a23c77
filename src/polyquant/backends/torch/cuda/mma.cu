// y[m, n] = sum_k x[m, k] * value(code[n, k]) * scale[n / BLOCK_ROWS, k / BLOCK], on tensor cores.
//
// The codes are the rows of the left operand of mma.m16n8k16, the activations its 8 columns: up to
// 8 rows of x cost what one costs. Codes enter the multiplier exactly (bf16 or f16 holds them all),
// sums are float32, and a block's scale multiplies the block's sum, so no weight is ever rounded.
//
// Reads the canonical bytes: lines of codes packed along k, little-endian. A warp owns 16 * RT rows
// of the weight and every (WK * KC)-th chunk of CHUNK values of k. It copies codes, scales and offsets to
// shared memory with cp.async, STAGES deep, for itself alone; the WN warps of one k slice share
// the chunk of x. A cluster of KC blocks of threads has WK * KC slices, which are added in order at
// the end, so that runs give the same bits.
//
// Of each 32 values along k thread t of a quad holds 8 consecutive ones, 8 t to 8 t + 7. Since a sum
// does not care about its order, they enter as the pairs (i, i + 4), which codes of 2 to 8 bits fall
// into by themselves; natural order where that is cheaper (NATURAL). x is paired to match.
//
// The caller guarantees: x is (M, K) with rows of XK >= K elements, XK a multiple of 8, 16-byte
// aligned; lines of codes are a multiple of CODE_PIECE bytes, those of scales of SCALE_PIECE. Codes
// and scales past the end of a line are read as zero, x past K must be zero or absent.
//
// Given by -D: F16 BITS KIND MANTISSA BLOCK SCALE OFFSET OFFSET_TYPE RT NT WN WK KC STAGES CHUNK
// CODE_PIECE SCALE_PIECE OFFSET_PIECE X_ROWS PLANES OUT. The numbers are named in mma.py.

#ifndef ABLATE
#define ABLATE 0
#endif
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

enum { SIGNED = 0, UNSIGNED = 1, MINIFLOAT = 2, E4M3 = 3, E5M2 = 4, LOOKUP = 5 };
enum { F32_T = 0, F16_T = 1, BF16_T = 2, UE8M0_T = 3, UE4M3_T = 4, U8_T = 5 };
enum { NO_OFFSET = 0, INTEGER_ZERO = 1, FLOAT_ZERO = 2, BIAS = 3 };

constexpr int ROWS = 16 * RT, COLUMNS = 8 * NT, GROUPS = CHUNK / 32;
constexpr int CODE_BYTES = CHUNK * BITS / 8;
constexpr int CODE_PITCH = CODE_BYTES + (BITS <= 4 ? 16 : 32);  // rows of a quad's loads: other banks
constexpr int X_PITCH = CHUNK * 2 + 64;                        // as above, for 16-byte loads
constexpr bool IN_BLOCKS = BLOCK != 0;
constexpr int PER_CHUNK = !IN_BLOCKS ? 0 : (BLOCK >= CHUNK ? 1 : CHUNK / BLOCK);
constexpr bool NATURAL = KIND == E4M3 || KIND == E5M2 || KIND == LOOKUP;
constexpr bool HALVES = BLOCK == 16;  // a quad's 32 values hold two blocks: threads 0, 1 and 2, 3
constexpr bool SUMS_X = OFFSET == FLOAT_ZERO || OFFSET == BIAS;
constexpr int LUT_COPIES = 32;  // one for each bank

__host__ __device__ constexpr int size_of(int type) {
  return type == F32_T ? 4 : type == F16_T || type == BF16_T ? 2 : 1;
}
__host__ __device__ constexpr int padded(int bytes) { return (bytes + 15) / 16 * 16; }

constexpr int SCALE_BYTES = PER_CHUNK * size_of(SCALE);
constexpr int OFFSET_BYTES = OFFSET == NO_OFFSET ? 0 : PER_CHUNK * size_of(OFFSET_TYPE);
constexpr int SCALE_PITCH = padded(SCALE_BYTES), OFFSET_PITCH = padded(OFFSET_BYTES);
constexpr int WARP_STAGE = ROWS * (CODE_PITCH + SCALE_PITCH + OFFSET_PITCH);
constexpr int X_STAGE = X_ROWS * X_PITCH;
constexpr int SLICE_STAGE = WN * WARP_STAGE + X_STAGE;
constexpr int LUT_BYTES = KIND == LOOKUP ? 256 * LUT_COPIES * 4 : 0;

// -- copies ---------------------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}

// PIECE bytes, or zeros where the source lies past its end.
template <int PIECE>
__device__ __forceinline__ void copy(u8* to, const u8* from, bool inside) {
  if constexpr (PIECE == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(inside ? 16 : 0));
  } else if constexpr (PIECE == 8 || PIECE == 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)),
                 "l"(from), "n"(PIECE), "r"(inside ? PIECE : 0));
  } else if constexpr (PIECE == 2) {  // too short for cp.async
    *(u16*)to = inside ? *(const u16*)from : (u16)0;
  } else {
    *to = inside ? *from : (u8)0;
  }
}

// BYTES of each of a warp's rows: a run of lines of something.
template <int BYTES, int PITCH, int PIECE>
struct Lines {
  static constexpr int PIECES = BYTES < PIECE ? 1 : BYTES / PIECE, ALL = ROWS * PIECES;
  static constexpr bool IN_STEP = 32 % PIECES == 0;  // a lane keeps its place along the line
  static constexpr int APART = IN_STEP ? 32 / PIECES : 1;
  const u8 *lines, *mine;  // the first line of all; what the lane copies first
  long long stride;
  int first, last, rows_per, line;  // rows of the weight; how many have one line; bytes of a line

  __device__ __forceinline__ Lines(const u8* lines, long long stride, int first, int n, int rows_per,
                                   int line, int lane)
      : lines(lines), stride(stride), first(first), last(n - 1), rows_per(rows_per), line(line) {
    mine = lines + (first + lane / PIECES) * stride + lane % PIECES * PIECE;
  }

  // Those from byte `start` of the lines on; zeros past the ends.
  __device__ __forceinline__ void fetch(u8* to, int start, int lane) const {
    if (IN_STEP && rows_per == 1) {
      const int row = lane / PIECES, byte = lane % PIECES * PIECE;
      const bool inside = start + byte < line;
      const u8* from = mine + start;
#pragma unroll
      for (int i = 0; i * 32 < ALL; i++) {
        if (ALL % 32 == 0 || lane + i * 32 < ALL)
          copy<PIECE>(to + (row + i * APART) * PITCH + byte, from,
                      inside && first + row + i * APART <= last);
        from += APART * stride;
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
  if constexpr (TYPE == UE8M0_T) return __uint_as_float(*p ? (u32)*p << 23 : 0x400000u);
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

// Two float32 that the fragment's type holds exactly (a table's entries: rounded), the low one first.
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 d;
#if F16
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
#endif
  return d;
}

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

// 8 codes of BITS bits, at a thread's place in a group's bytes, as 4 pairs of fields (i, i + 4), with
// other bits above them.
constexpr u32 MASK = both((1u << BITS) - 1);
__device__ __forceinline__ void fields(const u8* line, int t, u32 w, u32* f) {
  if constexpr (BITS == 4) {
#pragma unroll
    for (int i = 0; i < 4; i++) f[i] = w >> 4 * i;
  } else if constexpr (BITS == 2) {
    w = __byte_perm(*(const u16*)(line + 2 * t), 0, 0x4140);
#pragma unroll
    for (int i = 0; i < 4; i++) f[i] = w >> 2 * i;
  } else if constexpr (BITS == 1) {
    w = line[t], w |= w << 12;
#pragma unroll
    for (int i = 0; i < 4; i++) f[i] = w >> i;
  } else if constexpr (BITS == 8) {
    uint2 pair = *(const uint2*)(line + 8 * t);
#pragma unroll
    for (int i = 0; i < 4; i++) f[i] = __byte_perm(pair.x, pair.y, i | (4 + i) << 8);
  } else {
    int byte = BITS * t;
    const u32* words = (const u32*)(line + (byte & ~3));
    u32 shift = 8 * (byte & 3);
    u32 low = __funnelshift_r(words[0], words[1], shift);
    u32 high = BITS > 4 ? __funnelshift_r(words[1], words[2], shift) : 0;
    u64 whole = (u64)high << 32 | low;
    u32 first = (u32)whole, second = (u32)(whole >> 4 * BITS);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      constexpr u32 ONE_MASK = (1u << BITS) - 1;
      f[i] = (first >> BITS * i & ONE_MASK) | (second >> BITS * i & ONE_MASK) << 16;
    }
  }
}

// The 4 pairs of numbers of 8 codes. `word`: those of 4 bits, loaded already; `magic`: MAGIC and SIGN in both halves; `minus`: see subtrahend;
// `zero`: as a float32, for 8-bit codes.
__device__ __forceinline__ void decode(const u8* line, int t, u32 word, u32 magic, u32 minus, float zero,
                                       const u32* lut, u32* a) {
  if constexpr (KIND == LOOKUP) {
    const u8* bank = (const u8*)lut + threadIdx.x % 32 * 4;
    a[0] = *(const u32*)(bank + (word << 7 & 0x7F80));
    a[1] = *(const u32*)(bank + (word >> 1 & 0x7F80));
    a[2] = *(const u32*)(bank + (word >> 9 & 0x7F80));
    a[3] = *(const u32*)(bank + (word >> 17 & 0x7F80));
  } else if constexpr (KIND == E4M3) {
    uint2 w = *(const uint2*)(line + 8 * t);
    u32 words[2] = {w.x, w.y};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 pair;
      u16 codes = (u16)(words[i / 2] >> 16 * (i % 2));
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(codes));
      a[i] = from_f16(pair);
    }
  } else if constexpr (KIND == E5M2) {  // the upper byte of an f16
    uint2 w = *(const uint2*)(line + 8 * t);
    u32 words[2] = {w.x, w.y};
#pragma unroll
    for (int i = 0; i < 4; i++)
      a[i] = from_f16(__byte_perm(words[i / 2], 0, i % 2 ? 0x3424 : 0x1404));
  } else if constexpr (KIND == MINIFLOAT) {
    // Exponent and mantissa in place are the number times a power of two, subnormals too.
    constexpr int E = KIND == MINIFLOAT ? BITS - 1 - MANTISSA : 1, B = (1 << (E - 1)) - 1;
    constexpr u32 POWER = F16 ? (30u - B) << 10 : (254u - B) << 7;
    constexpr int UP = (F16 ? 10 : 7) - MANTISSA;
    if constexpr (BITS == 4) {
      constexpr u32 REST = both(7u << UP);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 top = word << (12 - 4 * i);
        a[i] = fma2((top & 0x80008000u) | (top >> (12 - UP) & REST), both(POWER), MINUS_ZERO2);
      }
    } else {
      constexpr u32 REST = both((1u << (BITS - 1)) - 1);
      u32 f[4];
      fields(line, t, word, f);
#pragma unroll
      for (int i = 0; i < 4; i++)
        a[i] = fma2((f[i] & both(1u << (BITS - 1))) << (16 - BITS) | (f[i] & REST) << UP,
                    both(POWER), MINUS_ZERO2);
    }
  } else if constexpr (BY_MAGIC) {
    u32 f[4];
    fields(line, t, word, f);
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = fma2(and_xor(f[i], MASK, magic), ONE2, minus);
  } else {  // 8 bits to bf16: 2^23 + u in float32 is 0x4B000000 with u in the lowest bits
    uint2 w = *(const uint2*)(line + 8 * t);
    w.x ^= SIGN * 0x01010101u;
    w.y ^= SIGN * 0x01010101u;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float low = __uint_as_float(__byte_perm(w.x, 0x4B000000u, 0x7440 | i));
      float high = __uint_as_float(__byte_perm(w.y, 0x4B000000u, 0x7440 | i));
      a[i] = pack(low - zero, high - zero);
    }
  }
}

// The words of 4-bit codes of two groups, of rows g and g + 8 each: ldmatrix hands thread t of a quad
// its word t of 16 bytes.
__device__ __forceinline__ void load_words(const u8* mine, u32 (*words)[2]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0][0]), "=r"(words[0][1]), "=r"(words[1][0]), "=r"(words[1][1])
               : "r"(shared_address(mine)) : "memory");
}

// Pairs of entries, LUT_COPIES times, so that each lane reads its own bank. For f16 they are scaled
// to use its whole range; returns what undoes that.
__device__ __forceinline__ float build_lut(u32* lut, const float* table) {
  float undo = 1.0f;
#if F16
  float top = 0.0f;
  for (int i = 0; i < 16; i++) top = fmaxf(top, fabsf(table[i]));
  int exponent = (int)(__float_as_uint(top) >> 23) - 127;  // 2^exponent <= top < 2^(exponent + 1)
  int up = min(max(14 - exponent, -126), 126);
  float by = __uint_as_float((u32)(127 + up) << 23);
  undo = __uint_as_float((u32)(127 - up) << 23);
#else
  float by = 1.0f;
#endif
  for (int i = threadIdx.x; i < 256 * LUT_COPIES / 4; i += 32 * WN * WK) {
    int entry = i / (LUT_COPIES / 4);
    u32 pair = pack(table[entry & 15] * by, table[entry >> 4] * by);
    ((uint4*)lut)[i] = make_uint4(pair, pair, pair, pair);
  }
  return undo;
}

// -- products -------------------------------------------------------------------------------------

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

// Rows g and g + 8 of 32 values of k: pairs of both rows times the pairs of x.
__device__ __forceinline__ void multiply(float* d, const u32* low, const u32* high, const u32* b) {
  mma(d, low[0], high[0], low[1], high[1], b[0], b[1]);
  mma(d, low[2], high[2], low[3], high[3], b[2], b[3]);
}

__device__ __forceinline__ void x_pairs(const u8* x, u32* b) {
  uint4 v = *(const uint4*)x;
  if constexpr (NATURAL) {
    b[0] = v.x, b[1] = v.y, b[2] = v.z, b[3] = v.w;
  } else {
    b[0] = __byte_perm(v.x, v.z, 0x5410), b[1] = __byte_perm(v.x, v.z, 0x7632);
    b[2] = __byte_perm(v.y, v.w, 0x5410), b[3] = __byte_perm(v.y, v.w, 0x7632);
  }
}

__device__ __forceinline__ void sync_slice(int slice) {
  if constexpr (WN == 1) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(slice + 1), "n"(32 * WN) : "memory");
  }
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// A number in the shared memory of a block of threads of the cluster.
__device__ __forceinline__ float peer(const float* p, int rank) {
  if constexpr (KC == 1) return *p;
  u32 there;
  float f;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(f) : "r"(there) : "memory");
  return f;
}

// The sums of one block, scaled, into the sums of all.
__device__ __forceinline__ void close_block(float (*acc)[4], const float (*d)[4],
                                            const float (*sum_x)[2], const u8* scales,
                                            const u8* offsets) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float s = number<SCALE>(scales + half * 8 * SCALE_PITCH);
    float o = 0.0f;
    if constexpr (SUMS_X) o = number<OFFSET_TYPE>(offsets + half * 8 * OFFSET_PITCH);
#pragma unroll
    for (int j = 0; j < NT; j++) {
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float whole = d[j][2 * half + c];
        float& to = acc[j][2 * half + c];
        if constexpr (OFFSET == FLOAT_ZERO) whole = __fsub_rn(whole, __fmul_rn(o, sum_x[j][c]));
        if constexpr (OFFSET == BIAS) {
          to += __fadd_rn(__fmul_rn(whole, s), __fmul_rn(o, sum_x[j][c]));
        } else {
          to = fmaf(whole, s, to);
        }
      }
    }
  }
}

struct Operands {
  const u8* x;             // (M, XK) bf16 or f16
  const u8* codes;         // N lines, code_stride bytes apart
  const u8* scales;        // lines of scales, scale_stride bytes apart; BLOCK 0: one a line
  const u8* offsets;
  const float* tensor_scale;
  const float* table;
  void* y;                 // (M / PLANES, N)
  long long code_stride, scale_stride, offset_stride;
  int m, n, xk, chunks, code_line, scale_line, offset_line, block_rows;
};

extern "C" __global__ void __launch_bounds__(32 * WN * WK) matmul(const Operands p) {
  extern __shared__ __align__(16) u8 shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int slice = warp / WN, across = warp % WN, g = lane / 4, t = lane % 4;
  const int first = blockIdx.x * (ROWS * WN) + across * ROWS;
  const int first_m = blockIdx.y * COLUMNS, m_here = min(p.m - first_m, COLUMNS);
  u32* lut = (u32*)shared;
  u8* stages = shared + LUT_BYTES + slice * STAGES * SLICE_STAGE;
  const u32 magic = both(MAGIC | SIGN) | (u32)(p.m >> 31);  // a constant that none can see
  float undo = 1.0f;

  const Lines<CODE_BYTES, CODE_PITCH, CODE_PIECE> code_lines(p.codes, p.code_stride, first, p.n, 1,
                                                             p.code_line, lane);
  const Lines<SCALE_BYTES, SCALE_PITCH, SCALE_PIECE> scale_lines(
      p.scales, p.scale_stride, first, p.n, p.block_rows, p.scale_line, lane);
  const Lines<OFFSET_BYTES, OFFSET_PITCH, OFFSET_PIECE> offset_lines(
      p.offsets, p.offset_stride, first, p.n, p.block_rows, p.offset_line, lane);

  auto fetch_weight = [&](int stage, int chunk) {
    u8* to = stages + stage * SLICE_STAGE + X_STAGE + across * WARP_STAGE;
    code_lines.fetch(to, chunk * CODE_BYTES, lane);
    const int block = BLOCK >= CHUNK ? chunk / max(1, BLOCK / CHUNK) : chunk * PER_CHUNK;
    if constexpr (IN_BLOCKS)
      scale_lines.fetch(to + ROWS * CODE_PITCH, block * size_of(SCALE), lane);
    if constexpr (OFFSET != NO_OFFSET)
      offset_lines.fetch(to + ROWS * (CODE_PITCH + SCALE_PITCH), block * size_of(OFFSET_TYPE), lane);
  };
  auto fetch_x = [&](int stage, int chunk) {
    constexpr int PIECES = CHUNK / 8;
    u8* to = stages + stage * SLICE_STAGE;
    for (int i = across * 32 + lane; i < m_here * PIECES; i += 32 * WN) {
      int row = i / PIECES, k = chunk * CHUNK + i % PIECES * 8;
      copy<16>(to + row * X_PITCH + i % PIECES * 16,
               p.x + ((long long)(first_m + row) * p.xk + k) * 2, k < p.xk);
    }
  };

  // Nothing of the kernel before may be read until it has ended; but DRAM can be asked already.
#if PREFETCH
  if (first + lane < p.n && lane < ROWS && slice == 0) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                     p.codes + (first + lane) * p.code_stride),
                 "r"(p.code_line));
  }
#endif
#if EARLY
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif

  if constexpr (KIND == LOOKUP) {
    undo = build_lut(lut, p.table);
    __syncthreads();
  }

  float acc[RT][NT][4] = {};
  const int first_chunk = blockIdx.z * WK + slice, apart = WK * KC;
  const int count = (p.chunks - first_chunk + apart - 1) / apart;
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < count) {
      fetch_weight(s, first_chunk + s * apart);
      fetch_x(s, first_chunk + s * apart);
    }
    asm volatile("cp.async.commit_group;");
  }
  for (int it = 0; it < count; it++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    sync_slice(slice);  // all have this chunk, and none is still at the one overwritten next
    const int next = it + STAGES - 1;
    if (next < count) {
      fetch_weight(next % STAGES, first_chunk + next * apart);
      fetch_x(next % STAGES, first_chunk + next * apart);
    }
    asm volatile("cp.async.commit_group;");

#if ABLATE != 1
    const u8* x_at = stages + it % STAGES * SLICE_STAGE + t * 16;
    const u8* codes = stages + it % STAGES * SLICE_STAGE + X_STAGE + across * WARP_STAGE;
    const u8* scales = codes + ROWS * CODE_PITCH + g * SCALE_PITCH;
    const u8* offsets = codes + ROWS * (CODE_PITCH + SCALE_PITCH) + g * OFFSET_PITCH;
    const u8* mine = codes + lane % 16 * CODE_PITCH + lane / 16 * 16;  // see load_words
    codes += g * CODE_PITCH;
    u32 words[RT][GROUPS][2];
    if constexpr (BITS == 4) {
#pragma unroll
      for (int c = 0; c < GROUPS; c += 2)
#pragma unroll
        for (int r = 0; r < RT; r++) load_words(mine + 16 * r * CODE_PITCH + c * 16, &words[r][c]);
    }
    constexpr int BLOCK_GROUPS = !IN_BLOCKS || BLOCK >= CHUNK ? GROUPS : (HALVES ? 1 : BLOCK / 32);
#pragma unroll
    for (int c = 0; c < GROUPS; c += BLOCK_GROUPS) {
      float d[HALVES ? 2 : 1][RT][NT][4] = {};
      float ones[HALVES ? 2 : 1][NT][4] = {};
      const int block = HALVES ? 2 * c : c / BLOCK_GROUPS;
#pragma unroll
      for (int e = 0; e < BLOCK_GROUPS; e++) {
        u32 b[NT][4];
#pragma unroll
        for (int j = 0; j < NT; j++)
          x_pairs(x_at + min(8 * j + g, X_ROWS - 1) * X_PITCH + (c + e) * 64, b[j]);
#pragma unroll
        for (int r = 0; r < RT; r++) {
          u32 a[2][4];
#pragma unroll
          for (int half = 0; half < 2; half++) {
            u32 minus = subtrahend(SIGN);
            float zero = 8388608.0f + SIGN;
            if constexpr (OFFSET == INTEGER_ZERO) {
              u32 z = SIGN + offsets[(16 * r + 8 * half) * OFFSET_PITCH + (HALVES ? block + t / 2 : block)];
              minus = subtrahend(z);
              zero = __uint_as_float(0x4B000000u | z);
            }
            decode(codes + (16 * r + 8 * half) * CODE_PITCH + (c + e) * 4 * BITS, t,
                   words[r][c + e][half], magic, minus, zero, lut, a[half]);
          }
#pragma unroll
          for (int j = 0; j < NT; j++) {
            if constexpr (!IN_BLOCKS) {
              multiply(acc[r][j], a[0], a[1], b[j]);
            } else if constexpr (HALVES) {
              u32 left[4], right[4];
#pragma unroll
              for (int i = 0; i < 4; i++) left[i] = t < 2 ? b[j][i] : 0, right[i] = t < 2 ? 0 : b[j][i];
              multiply(d[0][r][j], a[0], a[1], left);
              multiply(d[HALVES][r][j], a[0], a[1], right);
            } else {
              multiply(d[0][r][j], a[0], a[1], b[j]);
            }
          }
        }
        if constexpr (SUMS_X) {
          constexpr u32 ONES[4] = {ONE2, ONE2, ONE2, ONE2};
#pragma unroll
          for (int j = 0; j < NT; j++) {
            if constexpr (HALVES) {
              u32 left[4], right[4];
#pragma unroll
              for (int i = 0; i < 4; i++) left[i] = t < 2 ? b[j][i] : 0, right[i] = t < 2 ? 0 : b[j][i];
              multiply(ones[0][j], ONES, ONES, left);
              multiply(ones[HALVES][j], ONES, ONES, right);
            } else {
              multiply(ones[0][j], ONES, ONES, b[j]);
            }
          }
        }
      }
      if constexpr (IN_BLOCKS) {
#pragma unroll
        for (int h = 0; h < (HALVES ? 2 : 1); h++) {
          float sum_x[NT][2];
#pragma unroll
          for (int j = 0; j < NT; j++) sum_x[j][0] = ones[h][j][0], sum_x[j][1] = ones[h][j][1];
#pragma unroll
          for (int r = 0; r < RT; r++)
            close_block(acc[r], d[h][r], sum_x, scales + 16 * r * SCALE_PITCH + (block + h) * size_of(SCALE),
                        offsets + 16 * r * OFFSET_PITCH + (block + h) * size_of(OFFSET_TYPE));
        }
      }
    }
#endif
  }

  // -- the slices together, in order, and out -----------------------------------------------------
  constexpr int LINE = ROWS * WN + 1;  // an odd pitch in floats
  float* sums = (float*)(shared + LUT_BYTES);
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
#pragma unroll
  for (int r = 0; r < RT; r++)
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int row = across * ROWS + 16 * r + g + i / 2 * 8, column = 8 * j + 2 * t + i % 2;
        if (column < m_here) sums[(slice * COLUMNS + column) * LINE + row] = acc[r][j][i];
      }
  if constexpr (KC > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  const int rank = blockIdx.z;
  float whole = undo * (p.tensor_scale ? *p.tensor_scale : 1.0f);
  // A cluster's blocks of threads lie along k; each finishes its share of the results.
  for (int i = threadIdx.x + rank * 32 * WN * WK; i < ROWS * WN * (m_here / PLANES);
       i += 32 * WN * WK * KC) {
    int row = i % (ROWS * WN), column = i / (ROWS * WN), n = blockIdx.x * (ROWS * WN) + row;
    if (n >= p.n) continue;
    float y = 0.0f;
#pragma unroll
    for (int plane = PLANES - 1; plane >= 0; plane--) {  // the smallest first
      float one = 0.0f;
#pragma unroll
      for (int s = 0; s < WK * KC; s++)
        one += peer(sums + (s % WK * COLUMNS + column * PLANES + plane) * LINE + row, s / WK);
      y += one;
    }
    if constexpr (!IN_BLOCKS) y *= number<SCALE>(p.scales + n / p.block_rows * p.scale_stride);
    y *= whole;
    long long at = (long long)(first_m / PLANES + column) * p.n + n;
#if OUT == 0
    ((float*)p.y)[at] = y;
#elif OUT == 1
    u16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(y));
    ((u16*)p.y)[at] = half;
#else
    u16 half;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(y));
    ((u16*)p.y)[at] = half;
#endif
  }
  if constexpr (KC > 1) cluster_sync();  // none leaves while another reads its sums
}
