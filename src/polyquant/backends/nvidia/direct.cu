// Products of two quantized operands of 8-bit codes, which go from memory straight to registers, where
// each thread holds what it multiplies: see pairs.cuh. Memory is read faster than through shared memory.
//
// A warp owns 16 * RT rows of the weight and every WK-th chunk of CHUNK values of k. Of each 64 values
// thread t of a quad holds 16 t to 16 t + 15, of x too.
//
// The caller guarantees: lines of codes begin at, and are, whole 16 bytes; blocks are of 64 * j values.

constexpr int PIECES = CHUNK / 64;
// Codes are asked for before those at hand are multiplied: 1 us sooner, but integers' 2 us later.
constexpr bool AHEAD = !INTEGER;

// 16 bytes that are not kept in L1.
__device__ __forceinline__ uint4 stream(const u8* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// The scale of a line, for the block of value k.
template <int TYPE, int EXTENT>
__device__ __forceinline__ float scale_at(const u8* scales, int line, int rows_per, long long stride, int k) {
  if constexpr (EXTENT == 0) return 1.0f;
  return number<TYPE>(scales + line / rows_per * stride + k / (EXTENT ? EXTENT : 1) * size_of(TYPE));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) matmul(const Pair p) {
  extern __shared__ __align__(16) u8 shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int first = blockIdx.x * ROWS, first_m = blockIdx.y * COLUMNS, m_here = min(p.m - first_m, COLUMNS);
  const u32 magic = both(MAGIC | SIGN) | (u32)(p.m >> 31);  // a constant that none can see
  const u8 *rows[2 * RT], *columns[NT];
#pragma unroll
  for (int r = 0; r < 2 * RT; r++) rows[r] = p.codes + min(first + 8 * r + g, p.n - 1) * p.code_stride + 16 * t;
#pragma unroll
  for (int j = 0; j < NT; j++) columns[j] = p.x + (first_m + min(8 * j + g, m_here - 1)) * p.x_stride + 16 * t;

  uint4 w[2 * RT][PIECES];
  auto load_w = [&](int chunk) {
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const int byte = chunk * CHUNK + 64 * i;
#pragma unroll
      for (int r = 0; r < 2 * RT; r++)
        w[r][i] = byte + 16 * t < p.code_line ? stream(rows[r] + byte) : make_uint4(0, 0, 0, 0);
    }
  };
  load_w(warp);
  if (threadIdx.x < RT) announce_scales(p, first + 16 * threadIdx.x);
  follow();
  Total acc[RT][NT][4] = {};
  for (int chunk = warp; chunk < p.chunks; chunk += WK) {
    if (!AHEAD && chunk >= WK) load_w(chunk);
    uint4 x[NT][PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const int byte = chunk * CHUNK + 64 * i;
#pragma unroll
      for (int j = 0; j < NT; j++)
        x[j][i] = byte + 16 * t < p.code_line ? *(const uint4*)(columns[j] + byte) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int first_k = 0; first_k < CHUNK; first_k += CLOSED) {
      float s[2 * RT], left[NT][2];
      const int k = min(chunk * CHUNK + first_k, p.code_line - 1);
#pragma unroll
      for (int r = 0; r < 2 * RT; r++)
        s[r] = scale_at<SCALE, BLOCK>(p.scales, min(first + 8 * r + g, p.n - 1), p.block_rows, p.scale_stride, k);
#pragma unroll
      for (int i = 0; i < 2 * NT; i++)
        left[i / 2][i % 2] = scale_at<X_SCALE, X_BLOCK>(p.x_scales, first_m + min(i / 2 * 8 + 2 * t + i % 2, m_here - 1),
                                                        p.x_block_rows, p.x_scale_stride, k);
      Sum d[RT][NT][4];
      open(d, acc);
#pragma unroll
      for (int i = first_k / 64; i < (first_k + CLOSED) / 64; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          u32 b[NT][PER_GROUP];
#pragma unroll
          for (int j = 0; j < NT; j++)
            x_numbers(half ? x[j][i].z : x[j][i].x, half ? x[j][i].w : x[j][i].y, b[j]);
#pragma unroll
          for (int r = 0; r < RT; r++) {
            u32 a[2][PER_GROUP];
#pragma unroll
            for (int h = 0; h < 2; h++) {
              const uint4 v = w[2 * r + h][i];
              w_numbers(nullptr, t, half ? v.z : v.x, half ? v.w : v.y, magic, nullptr, a[h]);
            }
#pragma unroll
            for (int j = 0; j < NT; j++) multiply(d[r][j], a[0], a[1], b[j]);
          }
        }
      close(acc, d, s, left);
    }
    if (AHEAD) load_w(chunk + WK);
  }
  finish_pair(p, (float*)shared, acc, warp, 0, first_m, m_here, 1.0f);
}
