// Products of two quantized operands by Hopper's wgmma, m64nNk32 of 8-bit codes: y = left @ right^T.
//
// The left operand has the rows of the tensor cores' tile, the right one its columns; lines of both lie
// along k. Copies of 128 values of k come by TMA, STAGES deep, with the swizzle that wgmma reads. Where
// BITS is 8 both operands enter from shared memory, and x is the left one unless the weight is in
// blocks of fewer than 128 (TURNED). Else the weight is the left one: its codes become int8 or e4m3 in
// registers, exactly. LW x RW groups of four warps have 64 rows and
// 8 NT columns each; one more warp copies. KC blocks of a cluster share k, and add up in order; MC
// others, of neighbouring rows, get each other's part of the right operand by multicast.
//
// Integers of whole lines are exact in int32 (EXACT). Else the sums of CLOSED values, 128 or as few as
// share a scale, are closed: multiplied by a scale of each side, and added up in float32. That happens
// while the next 128 values are multiplied (DOUBLE), or the next of PARTS times 8 NT columns, for all
// of which the left operand is in registers.

#define IS_E2M1 (KIND == 5)
#define EXACT (INTEGER && LEFT_BLOCK == 0 && RIGHT_BLOCK == 0)
#define IN_REGISTERS (BITS != 8 || PARTS > 1)
constexpr int BM = 64 * LW, BN = 8 * NT * PARTS * RW, STEP = 128;
constexpr int LEFT_LINE = STEP * BITS / 8, LEFT_TILE = BM * LEFT_LINE, RIGHT_TILE = BN * STEP;
constexpr int STAGE = LEFT_TILE + RIGHT_TILE, WARPS = 4 * LW * RW, CLUSTER = KC * MC;
// TURNED: the weight is the left operand, and lines of y lie along the rows of the tile.
constexpr int OUT_PITCH = TURNED ? 48 : 80, OUT_BYTES = (TURNED ? 32 : 16) * OUT_PITCH;

#if INTEGER
typedef int Sum;
#define SUM_REGISTER "r"
#else
typedef float Sum;
#define SUM_REGISTER "f"
#endif
#if EXACT
typedef int Total;
#else
typedef float Total;
#endif

struct alignas(64) Wide {
  u64 left[16], right[16];  // how tiles are copied: CUtensorMaps
  const u8 *left_scales, *right_scales;
  const float *left_whole, *right_whole;
  void* y;
  long long left_stride, right_stride;  // bytes between lines of scales
  int m, n, steps, left_height, right_height;  // rows of left, of right; of 128 values; lines of a block
  int tiles_m, tiles_n;                        // of the tiles' rows (of whole clusters), and columns
  int early;                                   // whether none before writes the weight
};

// -- barriers and copies --------------------------------------------------------------------------

__device__ __forceinline__ void make_barrier(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// At the barrier of a block of the cluster.
__device__ __forceinline__ void arrive(u32 barrier, int rank) {
  if constexpr (MC == 1) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
  } else {
    asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
                 " mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(barrier), "r"(rank) : "memory");
  }
}
__device__ __forceinline__ void await(u32 barrier, u32 parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(barrier), "r"(parity) : "memory");
}
// A tile, zeros where it leaves the array.
__device__ __forceinline__ void copy_tile(u32 to, const u64* map, int k, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%2, %3}], [%4];"
               ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(barrier) : "memory");
}
__device__ __forceinline__ void copy_to_all(u32 to, const u64* map, int k, int row, u32 barrier, u32 mask) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
               " [%0], [%1, {%2, %3}], [%4], %5;"
               ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(barrier), "h"((u16)mask) : "memory");
}
__device__ __forceinline__ void sync_cluster() {
  if constexpr (CLUSTER > 1)
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void sync_multipliers() { asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory"); }

// -- scales ---------------------------------------------------------------------------------------

// What is read a step ahead, or for 32 values of which the last step has fewer, may not pass the line's end.
template <int TYPE, int EXTENT>
__device__ __forceinline__ float scale_at(const u8* line, int k, int last) {
  if constexpr (EXTENT == 0) return 1.0f;
  return number<TYPE>(line + min(k / (EXTENT ? EXTENT : 1), last) * size_of(TYPE));
}

// An exact int32 of up to 22 bits as a float32: the conversion is quicker where sums are closed often.
__device__ __forceinline__ float whole(int sum) {
  return CLOSED < STEP ? (float)sum : __int_as_float(sum + 0x4B400000) - 12582912.0f;
}
__device__ __forceinline__ float whole(float sum) { return sum; }

// -- codes of four bits ---------------------------------------------------------------------------

// e2m1 as e4m3 is 2^6 of the number, with room for 11 powers of two further down. So powers of two that
// scale 32 values each enter the codes, and what is closed are sums of 128 values under the largest.
#define FOLDS (IS_E2M1 && LEFT_SCALE == 3 && LEFT_BLOCK != 0 && LEFT_BLOCK < 128)
constexpr u32 MOST_DOWN = 11;
constexpr float UNIT = BITS == 8 ? 1.0f : INTEGER ? 1.0f / 16 : IS_E2M1 ? 1.0f / 64 : 512.0f;

#if BITS == 4
// Bytes of two words; unlike __byte_perm it takes the sign of a byte, eight times, where bit 3 says so.
__device__ __forceinline__ u32 bytes_of(u32 low, u32 high, u32 which) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(which));
  return d;
}

// Eight codes, the lowest first, to two words of int8 (16 times the number) or e4m3; of e2m1 under
// tables of entries.
__device__ __forceinline__ void widen(u32 v, u32 t0, u32 t1, u32* low, u32* high) {
  // Each code in the upper half of a byte; those that become e4m3 by their number, in the lower one.
  constexpr bool IS_LOW = !INTEGER && !IS_E2M1;
  const u32 even = IS_LOW ? v : v * 16, odd = IS_LOW ? v >> 4 : v;
  const u32 z[2] = {__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362)};
  u32* to[2] = {low, high};
#pragma unroll
  for (int i = 0; i < 2; i++) {
#if INTEGER
    *to[i] = z[i] & 0xF0F0F0F0u;
#elif IS_E2M1
    *to[i] = bytes_of(t0, t1, (v & 0x77777777u) >> 16 * i) | (z[i] & 0x80808080u);
#else
    // e4m3 of 0 to 15 is that many 2^-9. Below zero: 16 less the code, which is its complement and one.
    const u32 sign = z[i] >> 3 & 0x01010101u;
    *to[i] = ((z[i] & 0x0F0F0F0Fu) ^ sign * 15) + sign * 0x81;
#endif
  }
}
#endif

// The powers of two of a step's codes of rows g and g + 8.
struct Folded {
  u32 apart[2], tops[2];  // below the largest, a byte for each 32 values; the largest
  bool all;               // whether they enter the codes

  // Four bytes of each row.
  static __device__ __forceinline__ void fetch(u32* words, const u8* const* lines, int k, int last) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if constexpr (WORDS) {
        words[h] = *(const u32*)(lines[h] + min(k / 32, last - 3));
      } else {
        u32 word = 0;
#pragma unroll
        for (int s = 0; s < 4; s++) word |= (u32)lines[h][min((k + 32 * s) / (LEFT_BLOCK ? LEFT_BLOCK : 1), last)] << 8 * s;
        words[h] = word;
      }
    }
  }
  __device__ __forceinline__ void set(const u32* words, int group) {
    u32 wide = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const u32 word = words[h];
      tops[h] = max(max(word & 255, word >> 8 & 255), max(word >> 16 & 255, word >> 24));
      apart[h] = tops[h] * 0x01010101u - word;
      wide |= (apart[h] & 0x7F7F7F7Fu) + (127 - MOST_DOWN) * 0x01010101u | apart[h];
    }
    u32 any;  // of four warps, which multiply together
    asm volatile("{.reg .pred one, all; setp.ne.b32 one, %1, 0; barrier.cta.red.or.pred all, %2, 128, one;"
                 " selp.u32 %0, 1, 0, all;}" : "=r"(any) : "r"(wide & 0x80808080u), "r"(2 + group) : "memory");
    all = !any;
  }
  __device__ __forceinline__ void tables(int h, int s, u32* t0, u32* t1) const {
    const u32 down = FOLDS && all ? apart[h] >> 8 * s & 255 : 0;
    *t0 = 0x6C686000u - down * 0x08080800u, *t1 = 0x7C787470u - down * 0x08080808u;
  }
  __device__ __forceinline__ float top(int h) const {
    const u8 byte = tops[h];
    return number<UE8M0_T>(&byte);
  }
};

// -- sums -----------------------------------------------------------------------------------------

__device__ __forceinline__ float outer(const Wide& p, int row, int column, bool of_row) {
  float s = 1.0f;
  if (of_row) {
    if constexpr (LEFT_BLOCK == 0) s = number<LEFT_SCALE>(p.left_scales + min(row, p.m - 1) / p.left_height * p.left_stride);
    s *= UNIT * (p.left_whole ? *p.left_whole : 1.0f);
  } else {
    if constexpr (RIGHT_BLOCK == 0) s = number<RIGHT_SCALE>(p.right_scales + min(column, p.n - 1) / p.right_height * p.right_stride);
    s *= p.right_whole ? *p.right_whole : 1.0f;
  }
  return s;
}

// A warp's 16 rows of a tile: through shared memory, so that lines of y are written 32 bytes at a time or more.
__device__ __forceinline__ void put_rows(const Wide& p, u8* buffer, const Total (*acc)[4], int first_m, int first_n, int lane) {
  const int g = lane / 4, t = lane % 4, length = TURNED ? p.m : p.n;
  const float rows[2] = {outer(p, first_m + g, 0, true), outer(p, first_m + g + 8, 0, true)};
  if constexpr (OUT == 0) {
#pragma unroll
    for (int j = 0; j < NT; j++) {
      const float s[2] = {outer(p, 0, first_n + 8 * j + 2 * t, false), outer(p, 0, first_n + 8 * j + 2 * t + 1, false)};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = first_m + g + i / 2 * 8, column = first_n + 8 * j + 2 * t + i % 2;
        const long long at = TURNED ? (long long)column * length + row : (long long)row * length + column;
        if (row < p.m && column < p.n) ((float*)p.y)[at] = (float)acc[j][i] * rows[i / 2] * s[i % 2];
      }
    }
    return;
  }
  constexpr int TILES = 4;
  static_assert(NT % 2 == 0, "two at a time");
#pragma unroll
  for (int j0 = 0; j0 < NT; j0 += TILES) {
    __syncwarp();
#pragma unroll
    for (int j = j0; j < j0 + TILES && j < NT; j += 2) {
      u32 words[4];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int column = first_n + 8 * (j + h) + 2 * t;
        const float s0 = outer(p, 0, column, false), s1 = outer(p, 0, column + 1, false);
#pragma unroll
        for (int i = 0; i < 2; i++)
          words[2 * h + i] = pack_as<OUT == 1>((float)acc[j + h][2 * i] * rows[i] * s0, (float)acc[j + h][2 * i + 1] * rows[i] * s1);
      }
      if constexpr (TURNED) {  // matrices: tile j rows g, g + 8; the next tile's
        const u32 to = shared_address(buffer) + (8 * (j - j0 + lane / 16) + lane % 8) * OUT_PITCH + lane / 8 % 2 * 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                     ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
      } else {
        const u32 to = shared_address(buffer) + lane % 16 * OUT_PITCH + (j - j0 + lane / 16) * 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                     ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
      }
    }
    __syncwarp();
    constexpr int PIECES = TURNED ? 2 : 4, LINES = TURNED ? 8 * TILES : 16;  // of 16 bytes of a line
#pragma unroll
    for (int i = 0; i < PIECES * LINES / 32; i++) {
      const int line = (i * 32 + lane) / PIECES, piece = lane % PIECES;
      const int column = first_n + 8 * j0 + (TURNED ? line : 8 * piece), row = first_m + (TURNED ? 8 * piece : line);
      if (row >= p.m || column >= p.n || (TURNED ? line : 8 * piece) + 8 * j0 >= 8 * NT) continue;
      const u16* from = (const u16*)(buffer + line * OUT_PITCH + piece * 16);
      const int place = TURNED ? row : column;
      u16* y = (u16*)p.y + (long long)(TURNED ? column : row) * length + place;
      if (length % 8 == 0) {
        *(uint4*)y = *(const uint4*)from;
      } else {
        for (int e = 0; e < 8 && place + e < length; e++) y[e] = from[e];
      }
    }
  }
}

// The slices of k together, in order, and out: each block of the cluster its share of the lines of y.
constexpr int SUMS_PITCH = TURNED ? BM + 4 : BN + 8, TILE_LINE = TURNED ? BM : BN;
__device__ __forceinline__ void put_sums(float* sums, const Total (*acc)[4], int row, int column, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int j = 0; j < NT; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int r = row + g + i / 2 * 8, c = column + 8 * j + 2 * t + i % 2;
      ((Total*)sums)[TURNED ? c * SUMS_PITCH + r : r * SUMS_PITCH + c] = acc[j][i];
    }
}
__device__ __forceinline__ void finish_sums(const Wide& p, const float* sums, int first_m, int first_n, int rank) {
  const int lines = TURNED ? min(BN, p.n - first_n) : min(BM, p.m - first_m);
  const int first = TURNED ? first_m : first_n, length = TURNED ? p.m : p.n;
  constexpr int QUADS = TILE_LINE / 4;
  for (int i = threadIdx.x + rank % KC * 32 * WARPS; i < lines * QUADS; i += 32 * WARPS * KC) {
    const int line = i / QUADS, at = i % QUADS * 4;
    Total all[4] = {};
#pragma unroll
    for (int s = 0; s < KC; s++) {
      u32 there;
      Total f[4];
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(sums + line * SUMS_PITCH + at)), "r"(rank / KC * KC + s));
      asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(((u32*)f)[0]), "=r"(((u32*)f)[1]), "=r"(((u32*)f)[2]), "=r"(((u32*)f)[3]) : "r"(there) : "memory");
#pragma unroll
      for (int e = 0; e < 4; e++) all[e] += f[e];
    }
    if (first + at >= length) continue;
    float y[4];
    const float of_line = outer(p, first_m + line, first_n + line, !TURNED);
#pragma unroll
    for (int e = 0; e < 4; e++) y[e] = (float)all[e] * of_line * outer(p, first_m + at + e, first_n + at + e, TURNED);
    put(p.y, (long long)((TURNED ? first_n : first_m) + line) * length + first + at, y, min(length - first - at, 4), length % 4 == 0);
  }
}

// -- the product ----------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
// Lines of 128 bytes, groups of 8 of them 1024 bytes apart, with the 128-byte swizzle.
__device__ __forceinline__ u64 matrix_at(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// Registers of a thread: what one of so many begins with, what the warps that copy keep, and what the
// others have then.
constexpr int EVEN = 65536 / (THREADS * BLOCKS) / 8 * 8, AT_FIRST = EVEN > 248 ? 248 : EVEN;
constexpr int FEW = AT_FIRST < 40 ? 24 : 40;
constexpr int LEFT_OVER = (AT_FIRST * THREADS - FEW * 128) / (32 * WARPS) / 8 * 8;
constexpr int MANY = LEFT_OVER > 240 ? 240 : LEFT_OVER;
constexpr int RUN = BITS == 8 ? 8 : 4;  // steps that follow each other without a branch
// Scales of the right operand for the columns of a group: one for each 128.
constexpr int RIGHTS = RIGHT_BLOCK && PARTS > 1 ? PARTS * NT / 16 : 1;
// Sums of one step are added up in float32 while the next one is multiplied, where there are registers.
#define DOUBLE (CLOSED == 128 && !FOLDS && PARTS == 1 && (BITS == 8 || NT <= 8))
static_assert(PARTS == 1 || !(DOUBLE || EXACT), "sums of parts are closed in turn");
#if FOLDS
#define FOLDED_STEP(half) folded[half].all
#else
#define FOLDED_STEP(half) CLOSED == STEP
#endif

// So that none sees a constant: else ptxas (13.0) lets products wait for each other.
__device__ __forceinline__ void clear(float (*sums)[4]) {
#pragma unroll
  for (int i = 0; i < 4 * NT; i++) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(sums[i / 4][i % 4]));
}
__device__ __forceinline__ void clear(int (*sums)[4]) {
#pragma unroll
  for (int i = 0; i < 4 * NT; i++) asm volatile("mov.b32 %0, 0;" : "=r"(sums[i / 4][i % 4]));
}
// What was waited for is not read before.
__device__ __forceinline__ void touch(int (*sums)[4]) {
#pragma unroll
  for (int i = 0; i < 4 * NT; i++) asm volatile("" : "+r"(sums[i / 4][i % 4])::"memory");
}
// (Copies are read: where sums were written here, ptxas would let each product wait.)
__device__ __forceinline__ void close(Total (*acc)[4], const Sum (*part)[4], const float* scales) {
#pragma unroll
  for (int i = 0; i < 4 * NT; i++) {
    Sum sum;
    asm volatile("mov.b32 %0, %1;" : "=" SUM_REGISTER(sum) : SUM_REGISTER(part[i / 4][i % 4]) : "memory");
    acc[i / 4][i % 4] = fmaf(whole(sum), scales[i % 4 / 2], acc[i / 4][i % 4]);
  }
}
template <int N>
struct Number {
  __device__ constexpr int operator()() const { return N; }
};

constexpr int BY = 8;  // tiles of rows whose tiles share columns in the cache

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) matmul(const __grid_constant__ Wide p) {
  extern __shared__ u8 unaligned[];
  __shared__ u64 barriers[2 * STAGES];
  u8* shared = unaligned + (-(int)shared_address(unaligned) & 1023);
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), rank = CLUSTER > 1 ? blockIdx.z : 0;
  const u32 full = shared_address(barriers), empty = full + 8 * STAGES, stages = shared_address(shared);
  const int per = (p.steps + KC - 1) / KC, first_step = rank % KC * per, count = max(0, min(per, p.steps - first_step));
  const int groups = p.tiles_m / MC, all = groups * p.tiles_n;
  auto place_of = [&](int tile, int* first_m, int* first_n) {  // in groups of BY tiles' rows
    const int group = tile / (BY * p.tiles_n), size = min(groups - group * BY, BY), rest = tile - group * BY * p.tiles_n;
    *first_m = ((group * BY + rest % size) * MC + rank / KC) * BM, *first_n = rest / size * BN;
  };

  if (threadIdx.x == 32 * WARPS) {
    for (int s = 0; s < STAGES; s++) {
      make_barrier(full + 8 * s, 1);
      make_barrier(empty + 8 * s, WARPS * MC);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  sync_cluster();

  if (warp >= WARPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEW));
    if (threadIdx.x == 32 * WARPS) {
      u32 mask = 0;
      for (int i = 0; i < MC; i++) mask |= 1u << (rank % KC + KC * i);
      // Copies of one operand's part of a stage: of the weight they begin while the kernel before runs.
      auto copy_left = [&](int i, int first_m, u32 to, u32 barrier) {
        copy_tile(to, p.left, (first_step + i) * LEFT_LINE, first_m, barrier);
      };
      auto copy_right = [&](int i, int first_n, u32 to, u32 barrier) {
        const int part = rank / KC * (BN / MC);
        if constexpr (MC == 1) {
          copy_tile(to + LEFT_TILE, p.right, (first_step + i) * STEP, first_n, barrier);
        } else {
          copy_to_all(to + LEFT_TILE + part * STEP, p.right, (first_step + i) * STEP, first_n + part, barrier, mask);
        }
      };
      int ahead = 0;
      if (p.early && (TURNED || MC == 1)) {
        int first_m, first_n;
        place_of(blockIdx.x, &first_m, &first_n);
        for (; ahead < min(count, STAGES); ahead++) {
          expect(full + 8 * ahead, STAGE);
          if (TURNED) copy_left(ahead, first_m, stages + ahead * STAGE, full + 8 * ahead);
          else copy_right(ahead, first_n, stages + ahead * STAGE, full + 8 * ahead);
        }
      }
      follow();
      int stage = 0;
      u32 parity = 1;  // of a stage that was never filled the phase before has passed
      for (int tile = blockIdx.x; tile < all; tile += gridDim.x) {
        int first_m, first_n;
        place_of(tile, &first_m, &first_n);
        for (int i = 0; i < count; i++) {
          const u32 to = stages + stage * STAGE, barrier = full + 8 * stage;
          const bool begun = ahead > 0;
          if (begun) {
            ahead--;
          } else {
            await(empty + 8 * stage, parity);
            expect(barrier, STAGE);
          }
          if (!begun || !TURNED) copy_left(i, first_m, to, barrier);
          if (!begun || TURNED) copy_right(i, first_n, to, barrier);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MANY));
    const int group = warp / 4, g = lane / 4, t = lane % 4;
    const int my_m = group / RW * 64 + warp % 4 * 16, my_n = group % RW * (8 * NT * PARTS);  // in the tile
    int stage = 0;
    u32 parity = 0;
    Total acc[PARTS][NT][4];
    int none;
    asm volatile("mov.b32 %0, 0;" : "=r"(none));
#if !EXACT
    Sum part[2][NT][4];  // of which some kernels use one
    clear(part[0]);
    clear(part[1]);
#endif
    follow();
    for (int tile = blockIdx.x; tile < all; tile += gridDim.x) {
      int first_m, first_n;
      place_of(tile, &first_m, &first_n);
#pragma unroll
      for (int n = 0; n < PARTS; n++) clear(acc[n]);
      const u8* right_lines[RIGHTS];
#pragma unroll
      for (int r = 0; r < RIGHTS; r++)
        right_lines[r] = p.right_scales + min(first_n + my_n + 128 * r, p.n - 1) / p.right_height * p.right_stride;
      const u8* lines[2];
#pragma unroll
      for (int h = 0; h < 2; h++)
        lines[h] = p.left_scales + min(first_m + my_m + 8 * h + g, p.m - 1) / p.left_height * p.left_stride;
      const int left_last = (int)p.left_stride / size_of(LEFT_SCALE) - 1, right_last = (int)p.right_stride / size_of(RIGHT_SCALE) - 1;
      auto free_stage = [&](int which) {
        if (lane < MC) arrive(empty + 8 * which, rank % KC + KC * lane);
      };
#if IN_REGISTERS
#if BITS == 4
      // Where its codes begin in a tile, and which of two words' they are.
      const u32 mine = (my_m + g) * 64 + (my_m + g) / 2 % 4 * 16 + t / 2 * 4, which = t % 2 ? 0x7632 : 0x5410;
#else
      // Rows of four matrices of 8 rows of 16 bytes, as ldmatrix wants them: a lane's row, its first 16 bytes.
      const u32 mine = (my_m + lane % 16) * 128 + (lane % 8 ^ lane / 16) * 16;
#endif
      u32 powers_ahead[2];
      if constexpr (FOLDS) Folded::fetch(powers_ahead, lines, first_step * STEP, left_last);
      u32 a[2][4][4];  // of two steps: one is multiplied while the next is decoded
      Folded folded[2];
      auto decode_step = [&](int i, int from, u32 (*a)[4], Folded* powers) {
        if constexpr (FOLDS) {
          powers->set(powers_ahead, group);
          Folded::fetch(powers_ahead, lines, (first_step + i + 1) * STEP, left_last);
        }
#if BITS == 8
#pragma unroll
        for (int s = 0; s < 4; s++)
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                       : "=r"(a[s][0]), "=r"(a[s][1]), "=r"(a[s][2]), "=r"(a[s][3])
                       : "r"(stages + from * STAGE + (mine ^ 32 * s)) : "memory");
#else
        // Lines of 64 bytes, with the 64-byte swizzle.
        const u32 tile = stages + from * STAGE;
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const u32 at = tile + (mine ^ 16 * s) + 512 * h;
            u32 w0, w1, t0, t1;
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w0) : "r"(at) : "memory");
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w1) : "r"(at + 8) : "memory");
            powers->tables(h, s, &t0, &t1);
            widen(__byte_perm(w0, w1, which), t0, t1, &a[s][h], &a[s][2 + h]);
          }
#endif
#pragma unroll
        for (int s = 0; s < 16; s++) asm volatile("" : "+r"(a[s / 4][s % 4]));  // made here
      };
      if (count > 0 && PARTS == 1) {
        await(full + 8 * stage, parity);
        decode_step(0, stage, a[0], &folded[0]);
      }
#define LEFT_OF(half, s) a[half][s]
#else
#define LEFT_OF(half, s) left_at + 2 * (s)
#endif
      int k = first_step * STEP, done = 0;  // what is multiplied next; steps before it
      float scales[2][RIGHTS][2];           // of the sums that are open
      float right_ahead[RIGHTS], left_ahead[2];  // the next ones
      auto fetch_scales = [&](int k) {
#pragma unroll
        for (int r = 0; r < RIGHTS; r++) right_ahead[r] = scale_at<RIGHT_SCALE, RIGHT_BLOCK>(right_lines[r], k, right_last);
#pragma unroll
        for (int h = 0; h < 2; h++)
          if constexpr (LEFT_BLOCK >= STEP) left_ahead[h] = scale_at<LEFT_SCALE, LEFT_BLOCK>(lines[h], k, left_last);
      };
      fetch_scales(k);
      // A step's scales, and its stage: half of two in turn.
      auto begin = [&](auto half) {
#if !EXACT
#pragma unroll
        for (int i = 0; i < 2 * RIGHTS; i++)
          scales[half()][i / 2][i % 2] = LEFT_BLOCK >= STEP ? right_ahead[i / 2] * left_ahead[i % 2] : right_ahead[i / 2];
        fetch_scales(k + STEP);
#endif
        if (!IN_REGISTERS) await(full + 8 * stage, parity);
      };
      auto multiply = [&](Sum (*sums)[4], auto half, int columns, int first, auto size, bool adds) {
        const u64 left_at = matrix_at(stages + stage * STAGE + group / RW * (64 * STEP));
        const u64 right_at = matrix_at(stages + stage * STAGE + LEFT_TILE + (my_n + 8 * NT * columns) * STEP);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < size(); s++)
          wgmma(sums, LEFT_OF(half(), first + s), right_at + 2 * (first + s), adds || s != 0 ? 1 : none);
        wgmma_commit();
      };
      auto decode_next = [&](auto half) {
#if IN_REGISTERS
        if (done + 1 < count) {
          const int next = stage + 1 == STAGES ? 0 : stage + 1;
          await(full + 8 * next, next ? parity : parity ^ 1);
          decode_step(done + 1, next, a[1 - half()], &folded[1 - half()]);
        }
#endif
      };
      auto end = [&] {
        k += STEP, done++;
        if (++stage == STAGES) stage = 0, parity ^= 1;
      };
      auto free_before = [&] { free_stage(stage ? stage - 1 : STAGES - 1); };
      constexpr Number<0> even;
      constexpr Number<1> odd;
#if EXACT
      auto step = [&](auto half) {
        begin(half);
        multiply(acc[0], half, 0, 0, Number<4>(), true);
        wgmma_wait<1>();  // the step before
        if (done) free_before();
        decode_next(half);
        end();
      };
      while (done < count) {
        step(even);
        if (done < count) step(odd);
      }
      wgmma_wait<0>();
      if (count) free_before();
      touch(acc[0]);
#elif DOUBLE
      // Runs of steps: one is multiplied while the sums of the one before are closed.
      auto run = [&](auto length) {
#pragma unroll
        for (int j = 0; j < length(); j++) {
          auto step = [&](auto half, auto other) {
            begin(half);
            multiply(part[half()], half, 0, 0, Number<4>(), false);
            if (j) {
              wgmma_wait<1>();
              free_before();
            }
            decode_next(half);
            if (j) close(acc[0], part[other()], scales[other()][0]);
            end();
          };
          if (j % 2) step(odd, even);
          else step(even, odd);
        }
        wgmma_wait<0>();
        free_before();
        constexpr int LAST = (length() - 1) % 2;
        close(acc[0], part[LAST], scales[LAST][0]);
      };
      while (done + RUN <= count) run(Number<RUN>());
      while (done + 2 <= count) run(Number<2>());
      if (done < count) run(Number<1>());
#else
      auto step = [&](auto half) {
#if PARTS > 1
        await(full + 8 * stage, parity);
        decode_step(done, stage, a[half()], &folded[half()]);
#endif
        begin(half);
        if (FOLDED_STEP(half())) {
#if FOLDS
          for (int h = 0; h < 2; h++) scales[0][0][h] = folded[half()].top(h) * scales[half()][0][h];
#endif
          const float (*now)[2] = scales[FOLDS ? 0 : half()];
#pragma unroll
          for (int n = 0; n < PARTS; n++) {  // one is multiplied while the one before is closed
            multiply(part[n % 2], half, n, 0, Number<4>(), false);
            if (n == 0) {
              if (PARTS == 1) decode_next(half);
              continue;
            }
            wgmma_wait<1>();
            close(acc[n - 1], part[(n - 1) % 2], now[(n - 1) * RIGHTS / PARTS]);
          }
          wgmma_wait<0>();
          free_stage(stage);
          close(acc[PARTS - 1], part[(PARTS - 1) % 2], now[RIGHTS - 1]);
        } else {
#pragma unroll
          for (int first = 0; first < 4; first += CLOSED / 32) {
            float both[2] = {scales[half()][0][0], scales[half()][0][1]};
            if constexpr (LEFT_BLOCK && LEFT_BLOCK < STEP)
              for (int h = 0; h < 2; h++) both[h] *= scale_at<LEFT_SCALE, LEFT_BLOCK>(lines[h], k + 32 * first, left_last);
#pragma unroll
            for (int n = 0; n < PARTS; n++) {
              multiply(part[0], half, n, first, Number<CLOSED / 32>(), false);
              if (first == 0 && PARTS == 1) decode_next(half);
              wgmma_wait<0>();
              if (first + CLOSED / 32 == 4 && n == PARTS - 1) free_stage(stage);
              close(acc[n], part[0], both);
            }
          }
        }
        end();
      };
      while (done < count) {
        step(even);
        if (PARTS == 1 && done < count) step(odd);
      }
#endif
      if constexpr (KC == 1) {
#pragma unroll
        for (int n = 0; n < PARTS; n++)
          put_rows(p, shared + STAGES * STAGE + warp * OUT_BYTES, acc[n], first_m + my_m, first_n + my_n + 8 * NT * n, lane);
      } else {  // the block has no other tile
        sync_multipliers();
#pragma unroll
        for (int n = 0; n < PARTS; n++) put_sums((float*)shared, acc[n], my_m, my_n + 8 * NT * n, lane);
      }
    }
  }
  sync_cluster();
  if constexpr (KC > 1) {
    int first_m, first_n;
    place_of(blockIdx.x, &first_m, &first_n);
    if (warp < WARPS) finish_sums(p, (const float*)shared, first_m, first_n, rank);
    sync_cluster();
  }
}
