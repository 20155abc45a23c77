// As wgmma.cu, for codes of 8 bits in lines of whole 16 bytes, where slices of k are added up.
//
// Tiles of 128 codes of each line that a slice multiplies are copied by one instruction
// (cp.async.bulk.tensor, with the 128-byte swizzle), as tiles of x are, by a warp each, STAGES and X_STAGES
// chunks deep. So the warps that decode neither copy nor wait for their own copies: a quarter fewer
// instructions, and less shared memory. A lane asks for its rows' scales of a chunk while the one before is
// multiplied; a cache line holds those of eight chunks and more.
//
// The caller guarantees besides: KIND is no table, OFFSET and BATCHED are 0, CHUNK is 128, WK at most 2
// (4 where X_STAGES is STAGES), WK * KC more than 1; a chunk's scales of a line lie whole at multiples of their size.

constexpr int X_TILE = COLUMNS * 128, TILES = CHUNK / 64;
constexpr int X_STAGE = TILES * X_TILE, CODE_STAGE = WN * ROWS * CHUNK;
constexpr int X_BYTES = WK * X_STAGES * X_STAGE, RINGS_END = X_BYTES + WK * STAGES * CODE_STAGE;
constexpr int BARRIERS = 16 * (X_STAGES + STAGES);  // bytes of a slice's
constexpr int AT_FIRST = 65536 / (THREADS * BLOCKS) / 8 * 8, FEW = 24;  // registers: see wgmma.cu
constexpr int LEFT = (AT_FIRST * THREADS - FEW * (THREADS - WORKERS)) / WORKERS / 8 * 8;
constexpr int MANY = LEFT > 240 ? 240 : LEFT;
constexpr int UNIT = 4 * NT + 56 <= MANY ? 2 : 1, UNITS = GROUPS / UNIT;
static_assert(BITS == 8 && CHUNK == 128 && KIND != LOOKUP && OFFSET == NO_OFFSET && !BATCHED, "of the caller");
// Whether a chunk of codes and its tiles of x are one stage, which one warp copies.
constexpr bool JOINT = X_STAGES == STAGES;
static_assert(WORKERS / 32 * RECEIVED <= X_BYTES, "what is received lies where x was");
static_assert(RT == 1 && SLICES > 1 && WK <= (JOINT ? 4 : 2) && X_STAGES > 1, "of the caller");

struct alignas(64) Tiled {
  u64 x[16], codes[16];  // how tiles of them are copied: CUtensorMaps of bf16, two codes each
  Operands operands;
  int across, all;
};

// A chunk's scales of one line, in registers.
__device__ __forceinline__ void load_scales(Numbers<SCALE_BYTES>& to, const u8* from) {
  if constexpr (SCALE_BYTES == 1) {
    to.words[0] = __ldg(from);
  } else if constexpr (SCALE_BYTES == 2) {
    to.words[0] = __ldg((const u16*)from);
  } else if constexpr (SCALE_BYTES == 4) {
    to.words[0] = __ldg((const u32*)from);
  } else if constexpr (SCALE_BYTES == 8) {
    *(uint2*)to.words = __ldg((const uint2*)from);
  } else {
#pragma unroll
    for (int i = 0; i < SCALE_BYTES / 16; i++) *(uint4*)(to.words + 4 * i) = __ldg((const uint4*)from + i);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) matmul(const __grid_constant__ Tiled tiled) {
  const Operands& p = tiled.operands;
  extern __shared__ __align__(1024) u8 shared[];  // as the swizzle wants it
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform: see wgmma.cu
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int copier = warp - WN * WK;  // of x of each slice, of codes of each, none
  const int slice = copier < 0 ? warp / WN : copier % WK, apart = WK * KC;
  const u32 x_at = shared_address(shared) + slice * (X_STAGES * X_STAGE);
  const u32 codes_at = shared_address(shared) + X_BYTES + slice * (STAGES * CODE_STAGE);
  const u32 x_full = shared_address(shared) + RINGS_END + slice * BARRIERS, x_empty = x_full + 8 * X_STAGES;
  const u32 full = x_empty + 8 * X_STAGES, empty = full + 8 * STAGES;
  const u32 barriers = shared_address(shared) + RINGS_END + WK * BARRIERS + warp * WARP_BARRIERS;
  const int first_chunk = blockIdx.z * WK + slice, count = (p.chunks - first_chunk + apart - 1) / apart;
  const int first_line = blockIdx.x * (WN * ROWS), first_m = blockIdx.y * COLUMNS;

  auto make_ring = [&](u32 full, int stages) {
    for (int s = 0; s < stages; s++) {
      make_barrier(full + 8 * s, 1);
      make_barrier(full + 8 * (stages + s), WN);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
  };
  auto copy_x = [&](int i, int stage, u32 full) {
#pragma unroll
    for (int j = 0; j < TILES; j++)
      copy_tile(x_at + stage * X_STAGE + j * X_TILE, tiled.x, (first_chunk + i * apart) * CHUNK + j * 64,
                first_m, 0, full + 8 * stage);
  };
  auto copy_codes = [&](int i, int stage) {
    copy_tile(codes_at + stage * CODE_STAGE, tiled.codes, (first_chunk + i * apart) * (CHUNK / 2), first_line, 0,
              full + 8 * stage);
  };
  const bool of_x = copier >= 0 && copier < WK, of_codes = JOINT ? of_x : copier >= WK && copier < 2 * WK;
  constexpr int BYTES = CODE_STAGE + (JOINT ? X_STAGE : 0);
  if (lane == 0) {
    if (of_x && !JOINT) make_ring(x_full, X_STAGES);
    if (of_codes) {
      make_ring(full, STAGES);
      for (int i = 0; i < STAGES && i < count; i++) {
        expect(full + 8 * i, BYTES);
        copy_codes(i, i);
      }
    }
    if (of_x) asm volatile("prefetch.tensormap [%0];" ::"l"(tiled.x) : "memory");
  }
  if constexpr (BY_PAIRS) {
    if (copier < 0 && lane == 0) {
      make_barrier(barriers, KC - 1);
      make_barrier(barriers + 8, 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }
  __syncthreads();

  if (copier >= 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEW));
    if (lane > 0) return;
    int stage = 0;
    if (of_x) follow();
    if (of_codes) {
      u32 parity = 0;
      if constexpr (JOINT)
        for (int i = 0; i < STAGES && i < count; i++) copy_x(i, i, full);
      for (int i = STAGES; i < count; i++) {
        await(empty + 8 * stage, parity);
        expect(full + 8 * stage, BYTES);
        if constexpr (JOINT) copy_x(i, stage, full);
        copy_codes(i, stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
    } else if (of_x) {
      u32 parity = 1;  // of a stage that was never filled the phase before has passed
      for (int i = 0; i < count; i++) {
        await(x_empty + 8 * stage, parity);
        expect(x_full + 8 * stage, X_STAGE);
        copy_x(i, stage, x_full);
        if (++stage == X_STAGES) stage = 0, parity ^= 1;
      }
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MANY));
  const u32 none = (u32)(p.m >> 31);  // so that the compiler sees no constants
  const u32 magic = both(MAGIC | SIGN) | none, minus = subtrahend(SIGN) | none;
  const int first = first_line + warp % WN * ROWS;
  const u8* of_row[2];  // scales
  Numbers<SCALE_BYTES> scales[2], coming[2];
  int at = first_chunk;
  auto ask = [&] {
    const int block = BLOCK >= CHUNK ? at / max(1, BLOCK / CHUNK) : at * PER_CHUNK;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      load_scales(coming[half], of_row[half] + (BLOCK > CHUNK ? block * size_of(SCALE) : 0));
      of_row[half] += BLOCK > CHUNK ? 0 : apart * SCALE_BYTES;
    }
    at += apart;
  };
  if constexpr (IN_BLOCKS) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      of_row[half] = p.scales + min(first + g + 8 * half, p.n - 1) / p.block_rows * p.scale_stride +
                     (BLOCK > CHUNK ? 0 : first_chunk * SCALE_BYTES);
    if (count > 0) ask();
  }
  const u64 x_tiles = tiles_at(x_at);
  // Row g of the warp's, whose 16 bytes lie where the swizzle has the first, and the thread's place in them.
  const u32 line0 = codes_at + (warp % WN * ROWS + g) * CHUNK + g * 16 + (KIND == E4M3 ? 2 * t : t / 2 * 4);
  int stage = 0, x_stage = 0;
  u32 parity = 0, x_parity = 0;
  float acc[NT][4];
  clear(acc);
  for (int it = 0; it < count; it++) {
    if constexpr (IN_BLOCKS) {
      scales[0] = coming[0], scales[1] = coming[1];
      if (it + 1 < count) ask();
    }
    await(full + 8 * stage, parity);
    const u32 line = line0 + stage * CODE_STAGE;
    const u64 x_chunk = x_tiles + (x_stage * X_STAGE >> 4);
    u32 a[2][UNIT][2][4];
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
#pragma unroll
      for (int e = 0; e < UNIT; e++) {
        const int c = u * UNIT + e;
        const Factors factors[2] = {Factors(scales[0], c), Factors(scales[1], c)};
        const Group groups[2] = {Group(line, c, 0), Group(line, c, 8 * CHUNK)};
#pragma unroll
        for (int i = 0; i < 8; i++) {  // of 16 values (i / 4) rows g and g + 8, then 8 further on
          const int q = i / 4 * 2 + i % 4 / 2, half = i % 2;
          u32 pair = pair_of(groups[half], nullptr, q, t, magic, minus, 0, 0);
          if constexpr (IN_BLOCKS) pair = scaled(pair, factors[half].of[HALVES ? q / 2 : 0]);
          a[u % 2][e][i / 4][i % 4] = pair;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) asm volatile("" : "+r"(a[u % 2][e][i / 4][i % 4]));  // made here
      }
      if (u == 0 && !JOINT) await(x_full + 8 * x_stage, x_parity);
      if (u == UNITS - 1 && !JOINT) {
        __syncwarp();
        if (lane == 0) arrive(empty + 8 * stage);
      }
      wgmma_fence();
#pragma unroll
      for (int e = 0; e < UNIT; e++)
#pragma unroll
        for (int s = 0; s < 2; s++) {
          const int c = u * UNIT + e;
          wgmma(acc, a[u % 2][e][s], x_chunk + (c / 2 * X_TILE >> 4) + c % 2 * 4 + 2 * s);
        }
      wgmma_commit();
      wgmma_wait<1>();  // the ones before have read their registers, and their tiles of x
      if (u == 0 && it > 0 && lane == 0) arrive((JOINT ? empty : x_empty) + 8 * ((x_stage == 0 ? X_STAGES : x_stage) - 1));
    }
    if (++stage == STAGES) stage = 0, parity ^= 1;
    if constexpr (JOINT) x_stage = stage;
    else if (++x_stage == X_STAGES) x_stage = 0, x_parity ^= 1;
  }
  wgmma_wait<0>();
#pragma unroll
  for (int j = 0; j < NT; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) asm volatile("" : "+f"(acc[j][i])::"memory");
  sync_workers();  // all tiles are read
  const int m_here = min(p.m - first_m, COLUMNS), first_share = first_chunk * SHARE;
  float all[SHARE][4];
  u8* turned = shared + (BY_PAIRS ? warp * RECEIVED : SUMS + warp * TURNED);
  if constexpr (BY_PAIRS) {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // the others' barriers were made
    if (lane == 0) tell_others(barriers, first_chunk);
    exchange(turned, barriers, acc, all, first_chunk, lane);
  } else {
    add_slices((float4*)shared, acc, all, warp, first_share, lane);
    if constexpr (KC > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }
  put_rows(p, turned, all, first, first_m + 8 * first_share, m_here - 8 * first_share, PART, lane);
  if constexpr (KC > 1 && !BY_PAIRS)  // none leaves while another reads its sums
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
