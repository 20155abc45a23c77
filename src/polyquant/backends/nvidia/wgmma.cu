// As mma.cu, for more rows of x, bf16 or f16: by Hopper's wgmma, m64nNk16, N = 8 NT rows of x.
//
// Codes become numbers in registers, are multiplied by their block's scale, rounded to x's type, and are
// the left operand, whose layout is that of mma.m16n8k16; so sums run over the whole of k in the
// tensor cores. A warp owns 16 rows of the weight, which it copies for itself, STAGES chunks deep;
// four warps make a tile of 64 rows. While the tensor cores multiply one UNIT of k, the next one
// becomes numbers. For each slice of k one more warp copies tiles of 64 values of k of x
// (cp.async.bulk.tensor, with the 128-byte swizzle), X_STAGES deep, and mbarriers say which are full
// and which are free.
//
// The caller guarantees besides: RT is 1, WN whole fours, OFFSET no float, and scales of blocks that f16
// holds where it is x's type.

// -- the product ----------------------------------------------------------------------------------

constexpr int X_TILE = COLUMNS * 128;  // 64 values of k
constexpr int TILES = CHUNK / 64;      // of a chunk
// Registers of a thread: what one of so many begins with, what the warps that copy x keep, and what
// the others have then.
constexpr int AT_FIRST = 65536 / (THREADS * BLOCKS) / 8 * 8, FEW = 24;
constexpr int LEFT = (AT_FIRST * THREADS - FEW * (THREADS - WORKERS)) / WORKERS / 8 * 8;
constexpr int MANY = LEFT > 240 ? 240 : LEFT;

// Groups of 32 values that become numbers together. A chunk has an even number of them, since two
// take turns in registers; where those are scarce, one: ptxas would let products wait.
constexpr int UNIT = NT <= 16 && MANY >= 160 && GROUPS % 8 == 0 ? 4
                     : GROUPS % 4 == 0 && 4 * NT + 56 <= MANY   ? 2
                                                                : 1;
static_assert(RT == 1 && GROUPS / UNIT % 2 == 0, "units take turns");
constexpr int UNIT_TILES = UNIT < 2 ? 1 : UNIT / 2;
static_assert(X_STAGES >= 2 * UNIT_TILES, "a unit's tiles and those of the one before");
constexpr int X_BYTES = WK * X_STAGES * X_TILE;
constexpr int STAGES_END = X_BYTES + LUT_BYTES + WORKERS / 32 * WARP_BYTES;
static_assert(!BY_WARPS || TURNED <= WARP_STAGE, "turned round in a stage");

struct alignas(64) Tiled {
  u64 x[16];  // how tiles of it are copied: a CUtensorMap
  Operands operands;
  int across, all;  // blocks of WN warps' rows of the weight; those times tiles of rows of x, times products
};

// Which tile of the weight, and of x, one of all is. Those multiplied at the same time are of STRIP tiles
// of the weight, and some of x, which the L2 cache holds.
constexpr int STRIP = 32;
struct Place {
  int across, y;
  __device__ __forceinline__ Place(const Tiled& tiled, int tile) {
    const int down = tiled.all / tiled.across, strip = tile / (STRIP * down);
    const int wide = min(STRIP, tiled.across - strip * STRIP), in_strip = tile - strip * STRIP * down;
    y = in_strip / wide;
    across = strip * STRIP + in_strip % wide;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) matmul(const __grid_constant__ Tiled tiled) {
  const Operands& p = tiled.operands;
  extern __shared__ __align__(1024) u8 shared[];  // as the swizzle of tiles of x wants it
  u32* lut = (u32*)(shared + X_BYTES);
  // The same number for all of a warp, as the compiler sees then: addresses of tiles and barriers go to
  // uniform registers, and nothing lies between products.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const bool copies = warp >= WN * WK;
  const int slice = copies ? warp - WN * WK : warp / WN, apart = WK * KC;
  const u32 x_at = shared_address(shared) + slice * (X_STAGES * X_TILE);
  const u32 full = shared_address(shared) + STAGES_END + slice * (16 * X_STAGES), empty = full + 8 * X_STAGES;
  const u32 barriers = shared_address(shared) + STAGES_END + WK * 16 * X_STAGES + warp * WARP_BARRIERS;
  const int first_chunk = blockIdx.z * WK + slice, count = (p.chunks - first_chunk + apart - 1) / apart;
  const int first_tile = blockIdx.y * gridDim.x + blockIdx.x, step = gridDim.x * gridDim.y;
  float undo = PART, acc[NT][4];

  if (copies && slice < WK && lane == 0) {
    for (int s = 0; s < X_STAGES; s++) {
      make_barrier(full + 8 * s, 1);
      make_barrier(empty + 8 * s, WN);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if constexpr (BY_PAIRS) {
    if (!copies && lane == 0) {
      make_barrier(barriers, KC - 1);
      make_barrier(barriers + 8, 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }
  if constexpr (KIND == LOOKUP) undo = build_lut(lut, p.table);
  __syncthreads();

  if (copies) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEW));
    if (slice < WK && lane == 0) {
      follow();
      int stage = 0;
      u32 parity = 1;  // of a stage that was never filled the phase before has passed
      for (int tile = first_tile; tile < tiled.all; tile += step) {
        const int y = Place(tiled, tile).y, batch = BATCHED ? y / p.m_tiles : 0;
        for (int i = 0; i < count * TILES; i++) {
          await(empty + 8 * stage, parity);
          expect(full + 8 * stage, X_TILE);
          copy_tile(x_at + stage * X_TILE, tiled.x, (first_chunk + i / TILES * apart) * CHUNK + i % TILES * 64,
                    first_row(p, y), batch, full + 8 * stage);
          if (++stage == X_STAGES) stage = 0, parity ^= 1;
        }
      }
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MANY));
  const u32 none = (u32)(p.m >> 31);  // so that the compiler sees no constants
  const u32 magic = (FOLDS || FOURS ? SIGN2 : both(MAGIC | SIGN)) | none;
  const u32 minus_sign = (FOURS ? MINUS_SIGN_PART : subtrahend(SIGN)) | none;
  const u32 bank = shared_address(lut) + lane * 4;
  u8* stages = shared + X_BYTES + LUT_BYTES + warp * WARP_BYTES;
  auto first_of = [&](const Place& place) { return (place.across * WN + warp % WN) * ROWS; };
  auto weight_of = [&](int tile) {
    const Place place(tiled, tile);
    return Weight(of_batch(p, place.y), first_of(place), lane);
  };
  // What is copied next: chunks of a tile, then those of the block's next tile.
  Weight weight = weight_of(first_tile);
  int coming = first_tile, chunk = 0, into = 0, from = 0;
  auto fetch = [&] {
    if (chunk < count) {
      weight.fetch(shared_address(stages) + into * WARP_STAGE, first_chunk + chunk * apart, lane);
      chunk++;
      if constexpr (BY_WARPS) {
        if (chunk == count && (coming += step) < tiled.all) chunk = 0, weight = weight_of(coming);
      }
    }
    asm volatile("cp.async.commit_group;");
    if (++into == STAGES) into = 0;
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) fetch();
  const u64 x_tiles = tiles_at(x_at);
  int x_stage = 0;
  u32 parity = 0;
  bool begun = false;
  for (int tile = first_tile; tile < tiled.all; tile += step) {
    clear(acc);
    for (int it = 0; it < count; it++) {
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
      __syncwarp();  // all lanes' copies are here, and none is still at the chunk overwritten next
      fetch();

      const u8* mine = stages + from * WARP_STAGE;
      if (++from == STAGES) from = 0;
      Numbers<SCALE_BYTES> scales[2];
      Numbers<OFFSET_BYTES> offsets[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u8* from = mine + ROWS * CODE_PITCH;
        if constexpr (IN_BLOCKS) scales[half].load(from + (8 * half + g) * SCALE_PITCH);
        if constexpr (OFFSET != NO_OFFSET)
          offsets[half].load(from + ROWS * SCALE_PITCH + (8 * half + g) * OFFSET_PITCH);
      }
      u32 a[2][UNIT][2][4];
#pragma unroll
      for (int u = 0; u < GROUPS / UNIT; u++) {
#pragma unroll
        for (int e = 0; e < UNIT; e++) {
          const int c = u * UNIT + e;
          const u8* codes[2] = {mine + g * CODE_PITCH + c * 4 * BITS, mine + (g + 8) * CODE_PITCH + c * 4 * BITS};
          const Factors factors[2] = {Factors(scales[0], c), Factors(scales[1], c)};
          const Group groups[2] = {Group(codes[0], t), Group(codes[1], t)};
#pragma unroll
          for (int i = 0; i < 8; i++) {  // of 16 values (i / 4) rows g and g + 8, then 8 further on
            const int q = i / 4 * 2 + i % 4 / 2, half = i % 2;
            u32 minus = minus_sign;
            float zero = 8388608.0f + SIGN;
            if constexpr (OFFSET == INTEGER_ZERO && FOURS && !HALVES) {
              const u32 zeros = neighbours<OFFSET_BYTES>(offsets[half], c, 0x4140) + both(SIGN);
              minus = twice(fma2(zeros, both(0xFF00u), MINUS_ZERO2), c);
            } else if constexpr (OFFSET == INTEGER_ZERO) {
              const u32 z = SIGN + of_values<1>(offsets[half], c, q);
              minus = FOURS ? fma2(z * 0x10001u, both(0xFF00u), MINUS_ZERO2) : subtrahend(z);
              zero = __uint_as_float(0x4B000000u | z);
            }
            u32 pair = pair_of(groups[half], codes[half], q, t, magic, minus, zero, bank);
            if constexpr (IN_BLOCKS) pair = scaled(pair, factors[half].of[HALVES ? q / 2 : 0]);
            a[u % 2][e][i / 4][i % 4] = pair;
          }
#pragma unroll
          for (int i = 0; i < 8; i++) asm volatile("" : "+r"(a[u % 2][e][i / 4][i % 4]));  // made here
        }
        const int first_c = u * UNIT;
        u64 x_tile[UNIT_TILES];
#pragma unroll
        for (int j = 0; j < UNIT_TILES; j++) {
          const bool wraps = j > 0 && x_stage + j >= X_STAGES;
          const int stage = x_stage + j - (wraps ? X_STAGES : 0);
          if (first_c % 2 == 0) await(full + 8 * stage, parity ^ wraps);
          x_tile[j] = x_tiles + (stage * X_TILE >> 4);
        }
        wgmma_fence();
#pragma unroll
        for (int e = 0; e < UNIT; e++)
#pragma unroll
          for (int s = 0; s < 2; s++)
            wgmma(acc, a[u % 2][e][s], x_tile[e / 2] + (first_c + e) % 2 * 4 + 2 * s);
        wgmma_commit();
        wgmma_wait<1>();  // the ones before have read their registers, and their tiles of x
        if (first_c % 2 == 0 && lane < UNIT_TILES && begun) {
          const int before = x_stage - 1 - lane;
          arrive(empty + 8 * (before < 0 ? before + X_STAGES : before));
        }
        begun = true;
        if ((first_c + UNIT) % 2 == 0 && (x_stage += UNIT_TILES) >= X_STAGES)
          x_stage -= X_STAGES, parity ^= 1;
      }
    }
    if constexpr (BY_PAIRS) {  // the stages are read, and the others' barriers were made
      asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
      __syncwarp();
      if (lane == 0) tell_others(barriers, first_chunk);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) asm volatile("" : "+f"(acc[j][i])::"memory");
    const Place place(tiled, tile);
    const int y = place.y, first_m = first_row(p, y), m_here = min(p.m - first_m, COLUMNS);
    if constexpr (BY_WARPS) {
      u8* turned = stages + into * WARP_STAGE;  // where nothing is copied to before the next chunk
      put_rows(of_batch(p, y), turned, acc, first_of(place), first_m, m_here, undo, lane);
    } else if constexpr (BY_PAIRS) {  // the block has no other
      float all[SHARE][4];
      const int first = first_chunk * SHARE;
      exchange(stages, barriers, acc, all, first_chunk, lane);
      put_rows(of_batch(p, y), stages, all, first_of(place), first_m + 8 * first, m_here - 8 * first, undo, lane);
      break;
    } else {
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      sync_workers();
      u8* turned = shared + SUMS + warp * TURNED;
      float all[SHARE][4];
      const int first = first_chunk * SHARE;
      add_slices((float4*)shared, acc, all, warp, first, lane);
      if constexpr (KC > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
      put_rows(of_batch(p, y), turned, all, first_of(place), first_m + 8 * first, m_here - 8 * first, undo, lane);
      if constexpr (KC > 1)  // none leaves while another reads its sums
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
      break;
    }
  }
}
