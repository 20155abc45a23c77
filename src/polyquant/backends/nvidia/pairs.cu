// Products of two quantized operands by the copies, slices of k and sums of mma.cu: see pairs.cuh.
//
// Of each 32 values along k thread t of a quad holds its 4-byte word of each 16 bytes of x and of codes
// of 8 bits; beside narrower codes 8 t to 8 t + 7, in an order that these fall into by themselves.

constexpr int X_PER_CHUNK = X_BLOCK == 0 ? 0 : (X_BLOCK >= CHUNK ? 1 : CHUNK / X_BLOCK);
constexpr int X_PITCH = CHUNK + (BITS == 8 ? 16 : 32), X_SCALE_BYTES = X_PER_CHUNK * size_of(X_SCALE);
constexpr int X_SCALE_PITCH = padded(X_SCALE_BYTES);
constexpr int W_PITCH = CODE_BYTES + 16, W_STAGE = ROWS * (W_PITCH + SCALE_PITCH);
constexpr int X_STAGE = X_ROWS * (X_PITCH + X_SCALE_PITCH), SLICE_STAGE = WN * W_STAGE + X_STAGE;

// Four matrices of 8 rows of 16 bytes, one address a lane: thread t of a quad gets its word t of each.
__device__ __forceinline__ void load_matrices(const u8* mine, u32* words) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(mine)) : "memory");
}

// BYTES of each row of x by the warps of a slice; zeros from byte `inside` on.
template <int BYTES, int PITCH, int PIECE>
__device__ __forceinline__ void fetch_rows(u32 to, const u8* from, long long stride, int first, int rows,
                                           int rows_per, int inside, int thread) {
  constexpr int PIECES = BYTES < PIECE ? 1 : BYTES / PIECE, ALL = X_ROWS * PIECES;
#pragma unroll
  for (int i = 0; i * 32 * WN < ALL; i++) {
    const int at = thread + i * 32 * WN, row = at / PIECES, byte = at % PIECES * PIECE;
    if (row < rows && (ALL % (32 * WN) == 0 || at < ALL))
      copy<PIECE>(to + row * PITCH + byte, from + (first + row) / rows_per * stride + byte, byte < inside);
  }
}

__device__ __forceinline__ void fetch_x(const Pair& p, u32 to, int chunk, int first_m, int rows, int thread) {
  fetch_rows<CHUNK, X_PITCH, X_PIECE>(to, p.x + chunk * CHUNK, p.x_stride, first_m, rows, 1,
                                      p.x_line - chunk * CHUNK, thread);
  if constexpr (X_BLOCK != 0) {
    const int at = first_block<X_BLOCK>(chunk) * size_of(X_SCALE);
    fetch_rows<X_SCALE_BYTES, X_SCALE_PITCH, X_SCALE_PIECE>(
        to + X_ROWS * X_PITCH, p.x_scales + at, p.x_scale_stride, first_m, rows, p.x_block_rows,
        p.x_scale_line - at, thread);
  }
}

// The block of a chunk's value k.
template <int EXTENT>
__device__ __forceinline__ constexpr int place(int k) { return EXTENT && EXTENT < CHUNK ? k / EXTENT : 0; }

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) matmul(const Pair p) {
  extern __shared__ __align__(16) u8 shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int slice = warp / WN, across = warp % WN, g = lane / 4, t = lane % 4;
  const int first = blockIdx.x * (ROWS * WN) + across * ROWS;
  const int first_m = blockIdx.y * COLUMNS, m_here = min(p.m - first_m, COLUMNS);
  u32* lut = (u32*)shared;
  u8* stages = shared + LUT_BYTES + slice * STAGES * SLICE_STAGE;
  const u32 magic = both(MAGIC | SIGN) | (u32)(p.m >> 31);  // a constant that none can see
  float undo = 1.0f;

  const Lines<CODE_BYTES, W_PITCH, CODE_PIECE> w_lines(p.codes, p.code_stride, first, p.n, 1, p.code_line, lane);
  const Lines<SCALE_BYTES, SCALE_PITCH, SCALE_PIECE> w_scales(p.scales, p.scale_stride, first, p.n, p.block_rows,
                                                              p.scale_line, lane);
  auto x_of = [&](int stage) { return shared_address(stages) + stage * SLICE_STAGE; };
  auto fetch_w = [&](int stage, int chunk) {
    const u32 to = x_of(stage) + X_STAGE + across * W_STAGE;
    w_lines.fetch(to, chunk * CODE_BYTES, lane);
    if constexpr (IN_BLOCKS)
      w_scales.fetch(to + ROWS * W_PITCH, first_block<BLOCK>(chunk) * size_of(SCALE), lane);
  };
  const int first_chunk = blockIdx.z * WK + slice, apart = WK * KC;
  const int count = (p.chunks - first_chunk + apart - 1) / apart;
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++)
    if (s < count) fetch_w(s, first_chunk + s * apart);
  if (lane < RT) announce_scales(p, first + 16 * lane);
  if constexpr (KIND == LOOKUP) {
    undo = build_lut(lut, nullptr);
    __syncthreads();
  }

  Total acc[RT][NT][4] = {};
  follow();
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < count) fetch_x(p, x_of(s), first_chunk + s * apart, first_m, m_here, across * 32 + lane);
    asm volatile("cp.async.commit_group;");
  }
  for (int it = 0; it < count; it++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    sync_slice(slice);  // all have this chunk, and none is still at the one overwritten next
    const int next = it + STAGES - 1;
    if (next < count) {
      fetch_w(next % STAGES, first_chunk + next * apart);
      fetch_x(p, x_of(next % STAGES), first_chunk + next * apart, first_m, m_here, across * 32 + lane);
    }
    asm volatile("cp.async.commit_group;");
    const u8* x_at = stages + it % STAGES * SLICE_STAGE;
    const u8* codes = x_at + X_STAGE + across * W_STAGE;
    const u8* mine = codes + lane % 16 * W_PITCH + lane / 16 * 16;  // see load_matrices
    const u8* x_mine = x_at + min(lane % 8, X_ROWS - 1) * X_PITCH + lane / 8 * 16;
    const u8* x_scales = x_at + X_ROWS * X_PITCH;
    const u8* scales = codes + ROWS * W_PITCH + g * SCALE_PITCH;
    codes += g * W_PITCH;
    u32 words[RT][4], xs[NT][4];  // loaded for 32 or 64 values
#pragma unroll
    for (int first_k = 0; first_k < CHUNK; first_k += CLOSED) {
      Sum d[RT][NT][4];
      open(d, acc);
#pragma unroll
      for (int k = first_k; k < first_k + CLOSED; k += 32) {
        u32 b[NT][PER_GROUP];
        if (BITS != 8 || k % 64 == 0) {
#pragma unroll
          for (int j = 0; j < NT; j++) {
            if constexpr (BITS == 8) {
              load_matrices(x_mine + 8 * j * X_PITCH + k, xs[j]);
            } else {
              *(uint2*)xs[j] = *(const uint2*)(x_at + min(8 * j + g, X_ROWS - 1) * X_PITCH + k + 8 * t);
            }
          }
        }
#pragma unroll
        for (int j = 0; j < NT; j++) x_numbers(xs[j][BITS == 8 ? k / 16 % 4 : 0], xs[j][BITS == 8 ? k / 16 % 4 + 1 : 1], b[j]);
#pragma unroll
        for (int r = 0; r < RT; r++) {
          if (BITS == 8 || BITS == 4 && k % 64 == 0) load_matrices(mine + 16 * r * W_PITCH + k / 8 * BITS, words[r]);
          u32 a[2][PER_GROUP];
#pragma unroll
          for (int half = 0; half < 2; half++)
            w_numbers(codes + (16 * r + 8 * half) * W_PITCH + k / 8 * BITS, t,
                      words[r][BITS == 8 ? half : k / 16 % 4 + half], words[r][2 + half], magic, lut, a[half]);
#pragma unroll
          for (int j = 0; j < NT; j++) multiply(d[r][j], a[0], a[1], b[j]);
        }
      }
      float s[2 * RT], left[NT][2];
#pragma unroll
      for (int r = 0; r < 2 * RT; r++)
        s[r] = IN_BLOCKS ? number<SCALE>(scales + 8 * r * SCALE_PITCH + place<BLOCK>(first_k) * size_of(SCALE)) : 1.0f;
#pragma unroll
      for (int i = 0; i < 2 * NT; i++)
        left[i / 2][i % 2] = X_BLOCK ? number<X_SCALE>(x_scales + min(i / 2 * 8 + 2 * t + i % 2, X_ROWS - 1) * X_SCALE_PITCH +
                                                       place<X_BLOCK>(first_k) * size_of(X_SCALE)) : 1.0f;
      close(acc, d, s, left);
    }
  }

  asm volatile("cp.async.wait_group 0;" ::: "memory");
  even_out(slice, count, p.chunks);
  finish_pair(p, (float*)(shared + LUT_BYTES), acc, slice, across, first_m, m_here, undo);
}
