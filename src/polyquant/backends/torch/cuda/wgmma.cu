// As mma.cu, for more bf16 rows of x: by Hopper's wgmma, m64nNk16, N = 8 NT rows of x.
//
// Codes become numbers in registers, are multiplied by their block's scale, rounded to bf16, and are
// the left operand, whose layout is that of mma.m16n8k16; so sums run over the whole of k in the
// tensor cores. A warp owns 16 RT rows of the weight, which it copies for itself, STAGES chunks deep;
// four warps make RT tiles of 64 rows. While the tensor cores multiply one UNIT of k, the next one
// becomes numbers. x comes from arrange.cu as tiles of 64 values of k, in the order in which decode
// makes numbers and with the 128-byte swizzle: one more warp copies them by cp.async.bulk, X_STAGES
// deep, and mbarriers say which are full and which are free.
//
// The caller guarantees besides: WK is 1, OFFSET is no float, and K is padded to whole chunks in x.

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

// -- barriers -------------------------------------------------------------------------------------

__device__ __forceinline__ void make_barrier(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// One arrival, and the bytes that are still to come.
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void await(u32 barrier, u32 parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void copy_bulk(u32 to, const u8* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// -- the product ----------------------------------------------------------------------------------

constexpr int X_TILE = COLUMNS * 128;  // 64 values of k
constexpr int TILES = CHUNK / 64;      // of a chunk
// Groups of 32 values that become numbers together. A chunk has an even number of them, since two
// take turns in registers.
constexpr int UNIT = RT * NT <= 8 && GROUPS % 8 == 0 ? 4 : RT * NT <= 16 && GROUPS % 4 == 0 ? 2 : 1;
static_assert(GROUPS / UNIT % 2 == 0, "units take turns");
constexpr int UNIT_TILES = UNIT < 2 ? 1 : UNIT / 2;
static_assert(X_STAGES >= 2 * UNIT_TILES, "a unit's tiles and those of the one before");
constexpr int X_BYTES = X_STAGES * X_TILE;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) matmul(const Operands p) {
  extern __shared__ u8 unaligned[];
  __shared__ u64 barriers[2 * X_STAGES];
  u8* shared = unaligned + (-(int)shared_address(unaligned) & 1023);
  const u32 x_at = shared_address(shared), full = shared_address(barriers), empty = full + 8 * X_STAGES;
  u32* lut = (u32*)(shared + X_BYTES);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int first_m = first_row(p), m_here = min(p.m - first_m, COLUMNS);
  const int count = (p.chunks - (int)blockIdx.z + KC - 1) / KC;
  float undo = 1.0f, acc[RT][NT][4];

  if (threadIdx.x == 0) {
    for (int s = 0; s < X_STAGES; s++) {
      make_barrier(full + 8 * s, 1);
      make_barrier(empty + 8 * s, WN);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if constexpr (KIND == LOOKUP) undo = build_lut(lut, p.table);
  __syncthreads();

  if (warp == WN) {
    if (lane == 0) {
      // Only x is made by the kernel before; the weight was there when that one began.
      asm volatile("griddepcontrol.wait;" ::: "memory");
      const long long lines = (p.m + 7) / 8 * 8;  // of one tile of x
      const u32 bytes = (m_here + 7) / 8 * 1024;
      const u8* from = of_batch(p).x + (long long)first_m * 128;
      for (int i = 0; i < count * TILES; i++) {
        const int stage = i % X_STAGES;
        if (i >= X_STAGES) await(empty + 8 * stage, (i / X_STAGES - 1) & 1);
        const long long tile = (long long)(blockIdx.z + i / TILES * KC) * TILES + i % TILES;
        expect(full + 8 * stage, bytes);
        copy_bulk(x_at + stage * X_TILE, from + tile * lines * 128, bytes, full + 8 * stage);
      }
    }
    __syncwarp();
  } else {
    const int first = (blockIdx.x * WN + warp) * ROWS;
    const u32 magic = both(MAGIC | SIGN) | (u32)(p.m >> 31);  // a constant that none can see
    u8* stages = shared + X_BYTES + LUT_BYTES + warp * STAGES * WARP_STAGE;
    const Weight weight(of_batch(p), first, lane);
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
      for (int j = 0; j < NT; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[r][j][i] = 0.0f;
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
      if (s < count) weight.fetch(shared_address(stages) + s * WARP_STAGE, blockIdx.z + s * KC, lane);
      asm volatile("cp.async.commit_group;");
    }
    // Start address, bytes between groups of 8 rows (1024), and the 128-byte swizzle.
    const u64 x_tiles = (u64)((x_at & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
    int x_stage = 0;
    u32 parity = 0;
    for (int it = 0; it < count; it++) {
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
      __syncwarp();  // all lanes' copies are here, and none is still at the chunk overwritten next
      const int next = it + STAGES - 1;
      if (next < count)
        weight.fetch(shared_address(stages) + next % STAGES * WARP_STAGE, blockIdx.z + next * KC, lane);
      asm volatile("cp.async.commit_group;");

      const u8* mine = stages + it % STAGES * WARP_STAGE;
      const u8* codes = mine + g * CODE_PITCH;
      Numbers<SCALE_BYTES> scales[RT][2];
      Numbers<OFFSET_BYTES> offsets[RT][2];
#pragma unroll
      for (int r = 0; r < 2 * RT; r++) {
        const u8* from = mine + ROWS * CODE_PITCH;
        if constexpr (IN_BLOCKS) scales[r / 2][r % 2].load(from + (8 * r + g) * SCALE_PITCH);
        if constexpr (OFFSET != NO_OFFSET)
          offsets[r / 2][r % 2].load(from + ROWS * SCALE_PITCH + (8 * r + g) * OFFSET_PITCH);
      }
      u32 words[RT][2][2], a[2][UNIT][RT][2][4];
#pragma unroll
      for (int u = 0; u < GROUPS / UNIT; u++) {
#pragma unroll
        for (int e = 0; e < UNIT; e++) {
          const int c = u * UNIT + e;
#pragma unroll
          for (int r = 0; r < RT; r++) {
            if constexpr (BITS == 4) {
              if (c % 2 == 0)
                load_words(mine + (16 * r + lane % 16) * CODE_PITCH + lane / 16 * 16 + c * 16, words[r]);
            }
            u32 rows[2][4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
              u32 minus = subtrahend(SIGN);
              float zero = 8388608.0f + SIGN;
              if constexpr (OFFSET == INTEGER_ZERO) {
                u32 z = SIGN + of_group<1>(offsets[r][half], c, t);
                minus = subtrahend(z);
                zero = __uint_as_float(0x4B000000u | z);
              }
              decode(codes + (16 * r + 8 * half) * CODE_PITCH + c * 4 * BITS, t, words[r][c % 2][half],
                     magic, minus, zero, lut, rows[half]);
              if constexpr (IN_BLOCKS) {
                const u32 s = scale_pair(of_group<size_of(SCALE)>(scales[r][half], c, t));
#pragma unroll
                for (int i = 0; i < 4; i++) rows[half][i] = fma2(rows[half][i], s, MINUS_ZERO2);
              }
            }
#pragma unroll
            for (int s = 0; s < 2; s++) {
              u32* left = a[u % 2][e][r][s];
              left[0] = rows[0][2 * s], left[1] = rows[1][2 * s];
              left[2] = rows[0][2 * s + 1], left[3] = rows[1][2 * s + 1];
#pragma unroll
              for (int i = 0; i < 4; i++) asm volatile("" : "+r"(left[i]));  // made here
            }
          }
        }
        const int first_c = u * UNIT;
        u64 tile[UNIT_TILES];
#pragma unroll
        for (int j = 0; j < UNIT_TILES; j++) {
          const bool wraps = x_stage + j >= X_STAGES;
          const int stage = x_stage + j - (wraps ? X_STAGES : 0);
          if (first_c % 2 == 0) await(full + 8 * stage, parity ^ wraps);
          tile[j] = x_tiles + (stage * X_TILE >> 4);
        }
        wgmma_fence();
#pragma unroll
        for (int e = 0; e < UNIT; e++)
#pragma unroll
          for (int s = 0; s < 2; s++)
#pragma unroll
            for (int r = 0; r < RT; r++)
              wgmma(acc[r], a[u % 2][e][r][s], tile[e / 2] + (first_c + e) % 2 * 4 + 2 * s);
        wgmma_commit();
        wgmma_wait<1>();  // the ones before have read their registers, and their tiles of x
        if (first_c % 2 == 0 && lane < UNIT_TILES && it + u > 0) {
          const int before = x_stage - 1 - lane;
          arrive(empty + 8 * (before < 0 ? before + X_STAGES : before));
        }
        if ((first_c + UNIT) % 2 == 0 && (x_stage += UNIT_TILES) >= X_STAGES)
          x_stage -= X_STAGES, parity ^= 1;
      }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
      for (int j = 0; j < NT; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(acc[r][j][i])::"memory");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
  __syncthreads();
  float* sums = (float*)shared;
  if (warp < WN) {
#pragma unroll
    for (int r = 0; r < RT; r++) put_sums(sums, acc[r], 0, warp * ROWS + 16 * r, m_here, lane);
  }
  finish(of_batch(p), sums, first_m, m_here, undo);
}
