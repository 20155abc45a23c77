// What pairs.cu and direct.cu share: products of the codes of two operands, and what becomes of sums.
//
// y[m, n] = sum_k value(x[m, k]) * sx[m, k / X_BLOCK] * value(code[n, k]) * s[n / BLOCK_ROWS, k / BLOCK]
// of two quantized operands, few rows m, on tensor cores: the codes of the weight are the rows of the
// left operand, those of x its 8 columns, both read from their canonical bytes. INTEGER: codes of 8
// bits enter mma.m16n8k32 as they lie; those of 4 and 2 bits as 16 and 64 times their number, which
// takes a mask and a shift. Sums of a block, or of all of k where scales belong to rows, are exact in
// int32. Else x holds e4m3, and both enter mma.m16n8k16 as float16, exactly; sums are float32.
//
// Given by -D beside what codes.cuh wants (F16 1, no offsets): INTEGER, X_BLOCK (0: a scale a row),
// X_SCALE, X_PIECE, X_SCALE_PIECE.

struct Pair {
  const u8 *x, *codes;  // lines of codes: M of x, N of the weight
  const u8 *x_scales, *scales;
  const float *x_whole, *whole;  // scales of the whole tensors, or null
  void* y;                       // (M, N)
  long long x_stride, code_stride, x_scale_stride, scale_stride;  // bytes between lines
  int m, n, chunks, x_line, code_line, x_scale_line, scale_line;  // bytes of a line
  int x_block_rows, block_rows;                                   // lines of codes of one of scales
};

constexpr int smaller(int a, int b) { return a < b ? a : b; }
// Sums of so many values are closed: multiplied by a scale of each side, and added up in float32.
constexpr bool CLOSES = IN_BLOCKS || X_BLOCK != 0;
constexpr int CLOSED = smaller(smaller(IN_BLOCKS ? BLOCK : CHUNK, X_BLOCK ? X_BLOCK : CHUNK), smaller(CHUNK, 256));
// An integer of up to 22 bits added to the bits of 1.5 * 2^23 is that float32 plus the integer.
constexpr int BIASED = INTEGER && CLOSES ? 0x4B400000 : 0;
constexpr int PER_GROUP = INTEGER ? 2 : 4;  // words of 8 numbers
#define EXACT (INTEGER && BLOCK == 0 && X_BLOCK == 0)  // sums stay integers to the end
#if INTEGER
typedef int Sum;
constexpr float UNIT = BITS == 8 ? 1.0f : BITS == 4 ? 1.0f / 16 : 1.0f / 64;
#else
typedef float Sum;
constexpr float UNIT = 1.0f;
#endif
#if EXACT
typedef int Total;
__device__ __forceinline__ float bits_of(int sum) { return __int_as_float(sum); }
__device__ __forceinline__ int sum_of(float bits) { return __float_as_int(bits); }
#else
typedef float Total;
__device__ __forceinline__ float bits_of(float sum) { return sum; }
__device__ __forceinline__ float sum_of(float bits) { return bits; }
#endif

// -- products -------------------------------------------------------------------------------------

__device__ __forceinline__ void multiply(Sum* d, const u32* low, const u32* high, const u32* b) {
#if INTEGER
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(low[0]), "r"(high[0]), "r"(low[1]), "r"(high[1]), "r"(b[0]), "r"(b[1]));
#else
  mma(d, low[0], high[0], low[1], high[1], b[0], b[1]);
  mma(d, low[2], high[2], low[3], high[3], b[2], b[3]);
#endif
}

// 8 numbers of x, in the order of those of the weight.
__device__ __forceinline__ void x_numbers(u32 v0, u32 v1, u32* b) {
#if INTEGER
  b[0] = BITS == 8 ? v0 : __byte_perm(v0, v1, BITS == 4 ? 0x6420 : 0x5140);
  b[1] = BITS == 8 ? v1 : __byte_perm(v0, v1, BITS == 4 ? 0x7531 : 0x7362);
#else
  const u32 words[2] = {NATURAL ? v0 : __byte_perm(v0, v1, 0x5140), NATURAL ? v1 : __byte_perm(v0, v1, 0x7362)};
#pragma unroll
  for (int i = 0; i < 4; i++)
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(b[i]) : "h"((u16)(words[i / 2] >> 16 * (i % 2))));
#endif
}

// 8 numbers of a row of the weight: from words, or of 2 bits from the line.
__device__ __forceinline__ void w_numbers(const u8* line, int t, u32 w0, u32 w1, u32 magic, const u32* lut, u32* a) {
#if INTEGER
  if constexpr (BITS == 8) {
    a[0] = w0, a[1] = w1;
  } else if constexpr (BITS == 4) {
    a[0] = w0 << 4 & 0xF0F0F0F0u, a[1] = w0 & 0xF0F0F0F0u;
  } else {
    const u32 w = *(const u16*)(line + 2 * t) * 0x10001u;
    a[0] = (w << 6 & 0xC0C0u) | (w << 4 & 0xC0C00000u), a[1] = (w << 2 & 0xC0C0u) | (w & 0xC0C00000u);
  }
#else
  if constexpr (BITS == 2) {
    decode(line, t, 0, magic, subtrahend(SIGN), 8388608.0f + SIGN, lut, a);
  } else {
    numbers_of(w0, w1, magic, subtrahend(SIGN), 8388608.0f + SIGN, lut, a);
  }
#endif
}

// -- scales ---------------------------------------------------------------------------------------

// The first block of a chunk of k.
template <int EXTENT>
__device__ __forceinline__ int first_block(int chunk) {
  return EXTENT >= CHUNK ? chunk / (EXTENT < CHUNK ? 1 : EXTENT / CHUNK) : chunk * (EXTENT ? CHUNK / EXTENT : 0);
}

// -- sums -----------------------------------------------------------------------------------------

// The sums of CLOSED values, scaled, into the sums of all. `s`: scales of rows g and g + 8 of each 16;
// `left`: those of columns 2 t and 2 t + 1 of each 8.
__device__ __forceinline__ void close(Total (*acc)[NT][4], const Sum (*d)[NT][4], const float* s,
                                      const float (*left)[2]) {
#pragma unroll
  for (int r = 0; r < 2 * RT; r++)
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
      for (int c = 0; c < (X_ROWS == 1 ? 1 : 2); c++) {  // of one row of x only column 0 counts
        const Sum sum = d[r / 2][j][r % 2 * 2 + c];
        Total& to = acc[r / 2][j][r % 2 * 2 + c];
        if constexpr (CLOSES) {
          to = fmaf(BIASED ? __int_as_float((int)sum) - 12582912.0f : (float)sum, s[r] * left[j][c], to);
        } else {
          to = sum;
        }
      }
}

// What the sums of CLOSED values start from.
__device__ __forceinline__ void open(Sum (*d)[NT][4], const Total (*acc)[NT][4]) {
#pragma unroll
  for (int r = 0; r < RT; r++)
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) d[r][j][i] = CLOSES ? (Sum)BIASED : (Sum)acc[r][j][i];
}

// Asks for what the end wants of 16 rows of the weight to come as far as to the L2 cache.
__device__ __forceinline__ void announce_scales(const Pair& p, int first) {
  if constexpr (!IN_BLOCKS)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p.scales + min(first, p.n - 1) / p.block_rows * p.scale_stride));
}

// The slices of a cluster together, in order, scaled, and out: each block of threads its share.
__device__ __forceinline__ void finish_pair(const Pair& p, float* sums, const Total (*acc)[NT][4], int slice,
                                            int across, int first_m, int m_here, float undo) {
  __syncthreads();  // none reads the shared memory any more
#pragma unroll
  for (int r = 0; r < RT; r++) {
    float bits[NT][4];
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) bits[j][i] = bits_of(acc[r][j][i]);
    put_sums(sums, bits, slice, across * ROWS + 16 * r, m_here, threadIdx.x % 32);
  }
  if constexpr (KC > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  constexpr int QUADS = ROWS * WN / 4;  // of rows
  undo *= (p.whole ? *p.whole : 1.0f) * (p.x_whole ? *p.x_whole : 1.0f);
#pragma unroll 2
  for (int i = threadIdx.x + blockIdx.z * THREADS; i < QUADS * m_here; i += THREADS * KC) {
    const int row = i % QUADS * 4, column = i / QUADS, n = blockIdx.x * (ROWS * WN) + row;
    Total all[4] = {};
#pragma unroll
    for (int s = 0; s < WK * KC; s++) {
      const float4 f = peer(sums + (s % WK * COLUMNS + column) * SUMS_LINE + row, s / WK);
      const float part[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
      for (int j = 0; j < 4; j++) all[j] += sum_of(part[j]);
    }
    if (n >= p.n) continue;
    float y[4];
    const u8* left = p.x_scales + (first_m + column) / p.x_block_rows * p.x_scale_stride;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      y[j] = (float)all[j] * UNIT;
      if constexpr (!IN_BLOCKS)
        y[j] *= number<SCALE>(p.scales + min(n + j, p.n - 1) / p.block_rows * p.scale_stride);
      if constexpr (X_BLOCK == 0) y[j] *= number<X_SCALE>(left);
      y[j] *= undo;
    }
    put(p.y, (long long)(first_m + column) * p.n + n, y, min(p.n - n, 4), p.n % 4 == 0);
  }
  if constexpr (KC > 1) cluster_sync();  // none leaves while another reads its sums
}

