// As mma.cu, for more rows of x: by Hopper's wgmma, m64nNk16, N = 8 NT rows of x.
//
// A group of 4 warps owns 64 rows of the weight, WN / 4 groups share the chunk of x. Codes become the
// left operand in registers, whose layout is that of mma.m16n8k16; x is read from shared memory, in
// tiles of 64 values of k, 128 bytes a row, 16-byte pieces permuted by the row (the 128-byte
// swizzle). While the tensor cores multiply one block, the next one's codes become numbers.
//
// The caller guarantees besides: WK is 1 and RT is 1; of each 32 values along k x has the order in
// which decode makes them (see `arrange` in decode.py); XK is a multiple of 64.

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// Sums are not read before what stands before this.
__device__ __forceinline__ void settle(float (*d)[4]) {
#pragma unroll
  for (int j = 0; j < NT; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) asm volatile("" : "+f"(d[j][i])::"memory");
}

constexpr int TILE_BYTES = COLUMNS * 128;  // 64 values of k
constexpr int X_STAGE = CHUNK / 64 * TILE_BYTES;
constexpr int STAGE = (X_STAGE + WN * WARP_STAGE + 1023) / 1024 * 1024;
constexpr int UNIT = !IN_BLOCKS || HALVES ? 1 : (BLOCK >= CHUNK ? GROUPS : BLOCK / 32);  // groups
constexpr int UNITS = GROUPS / UNIT;

extern "C" __global__ void __launch_bounds__(32 * WN, BLOCKS) matmul(const Operands p) {
  extern __shared__ u8 unaligned[];
  u8* shared = unaligned + (-(int)shared_address(unaligned) & 1023);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int first = (blockIdx.x * WN + warp) * ROWS;
  const int first_m = blockIdx.y * COLUMNS, m_here = min(p.m - first_m, COLUMNS);
  const u32 magic = both(MAGIC | SIGN) | (u32)(p.m >> 31);  // a constant that none can see
  u32* lut = (u32*)shared;
  u8* stages = shared + LUT_BYTES;
  float undo = 1.0f;
  const Weight weight(p, first, lane);

  const Activations<32 * WN> x(p, first_m, m_here, threadIdx.x);
  auto place = [](int row, int piece) {
    return piece / 8 * TILE_BYTES + row * 128 + (piece % 8 ^ row % 8) * 16;
  };
  auto fetch = [&](int stage, int chunk) {
    const u32 to = shared_address(stages) + stage * STAGE;
    weight.fetch(to + X_STAGE + warp * WARP_STAGE, chunk, lane);
    x.fetch(to, chunk, place);
  };

#if EARLY
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  if constexpr (KIND == LOOKUP) undo = build_lut(lut, p.table);

  float acc[NT][4] = {};
  const int count = (p.chunks - (int)blockIdx.z + KC - 1) / KC;
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < count) fetch(s, blockIdx.z + s * KC);
    asm volatile("cp.async.commit_group;");
  }
  for (int it = 0; it < count; it++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();  // all have this chunk, and none is still at the one overwritten next
    const int next = it + STAGES - 1;
    if (next < count) fetch(next % STAGES, blockIdx.z + next * KC);
    asm volatile("cp.async.commit_group;");

    const u8* x_at = stages + it % STAGES * STAGE;
    const u8* mine = x_at + X_STAGE + warp * WARP_STAGE;
    const u8* codes = mine + g * CODE_PITCH;
    const u8* scales = mine + ROWS * CODE_PITCH + g * SCALE_PITCH;
    const u8* offsets = mine + ROWS * (CODE_PITCH + SCALE_PITCH) + g * OFFSET_PITCH;
    // Start address, bytes between groups of 8 rows (1024), and the 128-byte swizzle.
    const u64 x_tiles = (u64)((shared_address(x_at) & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
    u32 words[GROUPS][2];
    if constexpr (BITS == 4) {
#pragma unroll
      for (int c = 0; c < GROUPS; c += 2)
        load_words(mine + lane % 16 * CODE_PITCH + lane / 16 * 16 + c * 16, &words[c]);
    }
    u32 a[2][UNIT][2][4];
    auto decode_unit = [&](int unit) {
#pragma unroll
      for (int e = 0; e < UNIT; e++) {
        const int c = unit * UNIT + e;
        u32 rows[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          u32 minus = subtrahend(SIGN);
          float zero = 8388608.0f + SIGN;
          if constexpr (OFFSET == INTEGER_ZERO) {
            u32 z = SIGN + offsets[8 * half * OFFSET_PITCH + (HALVES ? 2 * c + t / 2 : unit)];
            minus = subtrahend(z);
            zero = __uint_as_float(0x4B000000u | z);
          }
          decode(codes + 8 * half * CODE_PITCH + c * 4 * BITS, t, words[c][half], magic, minus, zero,
                 lut, rows[half]);
        }
#pragma unroll
        for (int s = 0; s < 2; s++) {
          a[unit % 2][e][s][0] = rows[0][2 * s], a[unit % 2][e][s][1] = rows[1][2 * s];
          a[unit % 2][e][s][2] = rows[0][2 * s + 1], a[unit % 2][e][s][3] = rows[1][2 * s + 1];
#pragma unroll
          for (int i = 0; i < 4; i++)  // made here, and not after the wait for the block before
            asm volatile("" : "+r"(a[unit % 2][e][s][i])::"memory");
        }
      }
    };

    decode_unit(0);
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) {
      float d[NT][4];
#pragma unroll
      for (int h = 0; h < (HALVES ? 2 : 1); h++) {
        u32 side[2][4];
        if constexpr (HALVES) {
#pragma unroll
          for (int i = 0; i < 8; i++) side[i / 4][i % 4] = t / 2 == h ? a[unit % 2][0][i / 4][i % 4] : 0;
        }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 2 * UNIT; i++) {
          const int c = unit * UNIT + i / 2;
          const u64 tile = x_tiles + ((c / 2 * TILE_BYTES + c % 2 * 64 + i % 2 * 32) >> 4);
          const u32* left = HALVES ? side[i % 2] : a[unit % 2][i / 2][i % 2];
          wgmma(IN_BLOCKS ? d : acc, left, tile, !IN_BLOCKS || i > 0);
        }
        wgmma_commit();
        if constexpr (!IN_BLOCKS) wgmma_wait<1>();  // the one before has read its registers
        if (h == (HALVES ? 1 : 0) && unit + 1 < UNITS) decode_unit(unit + 1);
        if constexpr (IN_BLOCKS) {
          wgmma_wait<0>();
          settle(d);
          const int block = HALVES ? 2 * unit + h : unit;
          const float none[NT][2] = {};
          close_block(acc, d, none, scales + block * size_of(SCALE), offsets);
        }
      }
    }
    if constexpr (!IN_BLOCKS) wgmma_wait<0>();
  }
  settle(acc);

  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  float* sums = (float*)(shared + LUT_BYTES);
  put_sums(sums, acc, 0, warp * ROWS, m_here, lane);
  finish(p, sums, first_m, m_here, undo);
}
