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
// A tile of x, zeros where it leaves the array.
__device__ __forceinline__ void copy_tile(u32 to, const u64* map, int k, int row, int batch, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%2, %3, %4}], [%5];"
               ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(batch), "r"(barrier) : "memory");
}

// -- codes ----------------------------------------------------------------------------------------

// The words of 32 codes of a row: of 8 bits those with a thread's pairs (of e4m3, which the processor
// converts two at a time, the pairs alone), else all of them in each thread of a quad. (Other loads of what
// a thread needs would be as many instructions; and beside narrow registers ptxas 13.0 lets products wait.)
constexpr bool IN_BYTES = 8 % BITS == 0, SIXES = KIND == MINIFLOAT && BITS == 6 && !F16;
struct Group {
  u32 words[BITS];

  __device__ __forceinline__ Group(const u8* from, u32 t) {
    if constexpr (KIND == E4M3) {
#pragma unroll
      for (int q = 0; q < 4; q++)
        asm volatile("ld.shared.u16 %0, [%1];" : "=r"(words[q]) : "r"(shared_address(from + 8 * q + 2 * t)));
    } else if constexpr (SIXES) {
#pragma unroll
      for (int i = 0; i < 3; i++) *(uint2*)(words + 2 * i) = ((const uint2*)from)[i];
    } else if constexpr (BITS == 8) {
#pragma unroll
      for (int q = 0; q < 4; q++) words[q] = *(const u32*)(from + 8 * q + t / 2 * 4);
    } else if constexpr (BITS % 4 == 0) {
#pragma unroll
      for (int i = 0; i < BITS / 4; i++) *(uint4*)(words + 4 * i) = ((const uint4*)from)[i];
    } else if constexpr (BITS == 2) {
      *(uint2*)words = *(const uint2*)from;
    } else if constexpr (BITS == 1 || BITS == 3) {
#pragma unroll
      for (int i = 0; i < BITS; i++) words[i] = ((const u32*)from)[i];
    }
  }
};

// The lowest 8 bits of a bf16 alone in it count the smallest number there is, 2^-133. So a power of two
// makes integers of them, and the same instruction takes off the sign. Beside scales of which none is large
// that power is the scale's, and the instruction is all. The end undoes PART.
// (Of f16 1024 and a code are a number as they are.)
constexpr bool COUNTS = (KIND == SIGNED || KIND == UNSIGNED) && OFFSET == NO_OFFSET && !F16;
constexpr bool FOLDS = COUNTS && IN_BLOCKS && (SCALE == F16_T || SCALE == UE4M3_T);
constexpr bool BYTES_COUNT = COUNTS && BITS == 8;
// Of 4 bits a byte stands in both halves: in the lower one the first code counts, in the upper one the
// second counts 16 times.
constexpr bool FOURS = (KIND == SIGNED || KIND == UNSIGNED) && BITS == 4 && !F16;
constexpr float PART = FOLDS ? 4194304.0f : BYTES_COUNT || FOURS ? 64.0f : 1.0f;
constexpr u32 halves(u32 low, u32 high) { return high << 16 | low; }
// A power of two for numbers, of FOURS its 16th for the upper ones.
constexpr u32 power(int exponent) {
  return halves((127 + exponent) << 7, (127 + exponent - 4 * FOURS) << 7);
}
constexpr u32 UP2 = power(111);  // 2^133 over PART
// Minus the sign: so many of the smallest number, and over 64.
constexpr u32 SIGN2 = halves(SIGN, FOURS ? 16 * SIGN : SIGN), MINUS_SIGN = MINUS_ZERO2 | SIGN2;
constexpr u32 MINUS_SIGN_PART = SIGN ? both(0x8000u | (127 - 6 + BITS - 1) << 7) : MINUS_ZERO2;

// Codes 8 q + 2 t and the next, as numbers: what thread t of a quad holds of k.
__device__ __forceinline__ u32 pair_of(const Group& group, const u8* from, u32 q, u32 t, u32 magic,
                                       u32 minus, float zero, u32 bank) {
  if constexpr (BITS == 8) {
    const u32 word = group.words[q];
    t %= 2;
    u32 pair;
    if constexpr (KIND == E4M3) {
      asm("{.reg .b16 two, rest; mov.b32 {two, rest}, %1; cvt.rn.f16x2.e4m3x2 %0, two;}"
          : "=r"(pair) : "r"(word));
      return from_f16(pair);
    } else if constexpr (KIND == E5M2) {
      return from_f16(__byte_perm(word, 0, 0x1404 + 0x2020 * t));
    } else if constexpr (BYTES_COUNT) {
      const u32 u = __byte_perm(word, 0, 0x4140 + 0x0202 * t) ^ both(SIGN);
      return FOLDS ? u : fma2(u, both(0x7F00u), MINUS_SIGN_PART);
    } else if constexpr (F16) {
      return fma2(and_xor(__byte_perm(word, 0, 0x4140 + 0x0202 * t), both(0xFF), magic), ONE2, minus);
    } else {
      const u32 u = __byte_perm(word, 0, 0x0010 + 0x22 * t) ^ SIGN * 0x0101u;
      return pack(__uint_as_float(__byte_perm(u, 0x4B000000u, 0x7440)) - zero,
                  __uint_as_float(__byte_perm(u, 0x4B000000u, 0x7441)) - zero);
    }
  } else if constexpr (IN_BYTES) {
    const u32 bit = BITS * (8 * q + 2 * t), in_word = bit % 32 / 8;
    if constexpr (FOURS) {
      const u32 both = __byte_perm(group.words[q], 0, 0x4040 + 0x0101 * in_word);
      const u32 pair = and_xor(both, halves(0x0F, 0xF0), magic);
      return FOLDS ? pair : fma2(pair, power(127), minus);
    }
    u32 byte = __byte_perm(group.words[BITS * q / 4], 0, 0x4440 | in_word);
    if constexpr (KIND == LOOKUP) return shared_word(bank, byte);
    if constexpr (BITS < 4) byte >>= bit % 8;
    const u32 two = byte * (1 + (1 << (16 - BITS)));  // it, and again further up
    if constexpr (FOLDS) return and_xor(two, MASK, magic);
    return from_fields(two, magic, minus);
  } else if constexpr (BITS == 3) {
    const u32 eight = q == 0   ? group.words[0]
                      : q == 1 ? __byte_perm(group.words[0], group.words[1], 0x6543)
                      : q == 2 ? __byte_perm(group.words[1], group.words[2], 0x5432)
                               : group.words[2] >> 8;
    const u32 two = (eight >> 6 * t & 63) * (1 + (1 << 13));
    if constexpr (FOLDS) return and_xor(two, MASK, magic);
    return from_fields(two, magic, minus);
  } else if constexpr (SIXES) {  // two bytes hold the pair, 0 or 4 bits up
    constexpr int E = KIND == MINIFLOAT ? 5 - MANTISSA : 1, UP = 7 - MANTISSA;
    const u32* words = group.words + q / 2 * 3 + q % 2;
    const u32 w = __byte_perm(words[0], words[1], 0x11 * (t + t / 2) + (q % 2 ? 0x32 : 0x10));
    const u32 up = t % 2 ? 1 << UP - 4 : 1 << UP;  // a multiplication shifts
    const u32 two = merge(w * up, w * (up << 10), 0xFFFF);
    const u32 placed = (two & both(31 << UP)) | (two << 10 - UP & both(0x8000));
    return fma2(placed, both(255 - (1 << (E - 1)) << 7), MINUS_ZERO2);
  } else {
    const u32 byte = BITS * q + 2 * BITS * t / 8, shift = 2 * BITS * t % 8;
    const u32* words = (const u32*)(from + (byte & ~3));
    const u32 two = __funnelshift_r(words[0], words[1], 8 * (byte & 3) + shift) & (1u << 2 * BITS) - 1;
    if constexpr (FOLDS) return and_xor(two | two << (16 - BITS), MASK, magic);
    return from_fields(two | two << (16 - BITS), magic, minus);
  }
}

// Numbers of one byte go in pairs: that of group c of 32 values, and the other of its two, one in each half
// (by 0x4140 in the lower bytes, by 0x1404 in the upper ones); and one of a pair, twice.
constexpr int number_of(int c) { return BLOCK >= CHUNK ? 0 : c * 32 / BLOCK; }
template <int BYTES>
__device__ __forceinline__ u32 neighbours(const Numbers<BYTES>& numbers, int c, u32 where) {
  const int i = number_of(c);
  return __byte_perm(numbers.words[i / 4], 0, where + (i % 4 < 2 ? 0 : where == 0x4140 ? 0x0202 : 0x2020));
}
__device__ __forceinline__ u32 twice(u32 pair, int c) {
  return __byte_perm(pair, 0, number_of(c) % 2 ? 0x3232 : 0x1010);
}

// The scales of 32 values of a row: of each 16 one, else one.
struct Factors {
  u32 of[HALVES ? 2 : 1];

  __device__ __forceinline__ Factors(const Numbers<SCALE_BYTES>& scales, int c) {
    if constexpr (SCALE == UE4M3_T && HALVES) {
      float low, high;
      asm("{.reg .b16 c, l, h; .reg .b32 pair; mov.b32 {c, h}, %2; cvt.rn.f16x2.e4m3x2 pair, c;"
          " mov.b32 {l, h}, pair; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
          : "=f"(low), "=f"(high) : "r"(scales.template at<2>(c)));
      of[0] = pack(low, low), of[HALVES] = pack(high, high);
    } else if constexpr (SCALE == UE8M0_T && !HALVES) {  // with its neighbour's, whose work is the same
      u32 pair = __vmaxu2(neighbours<SCALE_BYTES>(scales, c, 0x1404) >> 1, both(0x40));  // 0 is 2^-127
      pair = fma2(pair, 0, pair);  // 255, infinity here, is NaN
      of[0] = twice(pair, c);
    } else if constexpr (IN_BLOCKS) {
#pragma unroll
      for (int i = 0; i <= HALVES; i++) of[i] = scale_pair(of_values<size_of(SCALE)>(scales, c, 2 * i));
    }
  }
};

// -- sums -----------------------------------------------------------------------------------------

// Slices of k that are added up. With one, a warp puts out its own 16 rows, while what its block of
// threads multiplies next is copied; with more, each warp puts out a share of the tiles of eight rows of
// x that it and those of the other slices have multiplied.
constexpr int SLICES = WK * KC, SHARE = (NT + SLICES - 1) / SLICES;
constexpr bool BY_WARPS = SLICES == 1;
// Whether each warp exchanges sums with that of its rows in the other blocks of threads of a cluster, by
// itself: while others still multiply, and only what is added up elsewhere.
constexpr bool BY_PAIRS = KC > 1 && WK == 1;
constexpr int SUMS = BY_WARPS || BY_PAIRS ? 0 : WORKERS / 32 * NT * 512;
constexpr int RECEIVED = BY_PAIRS ? (KC - 1) * SHARE * 512 : 0;
// Of a warp: stages, where what others send it comes to in the end; and two barriers.
constexpr int WARP_BYTES = STAGES * WARP_STAGE > RECEIVED ? STAGES * WARP_STAGE : RECEIVED;
constexpr int WARP_BARRIERS = BY_PAIRS ? 16 : 0;
// Tiles turned round together in shared memory: with one slice in the place of the chunk that was read last.
constexpr int TURNED_TILE = 8 * 32;
constexpr int fitting(int tiles) {
  const bool fits = tiles <= SHARE && (!BY_WARPS || tiles * TURNED_TILE <= WARP_STAGE);
  return fits || tiles == 2 ? tiles : fitting(tiles / 2);
}
constexpr int OUT_TILES = fitting(8), TURNED = OUT_TILES * TURNED_TILE;

// SHARE tiles of a warp's rows, `first` to `first` + 15.
__device__ __forceinline__ void put_rows(const Operands& p, u8* turned, const float (*acc)[4], int first,
                                         int first_m, int m_here, float undo, int lane) {
  const float whole = scale_of_all(p, undo);
  const float scales[2] = {scale_of_row(p, first + lane / 4), scale_of_row(p, first + lane / 4 + 8)};
  if constexpr (OUT == 0) {  // float32: eight neighbours at once as they are
#pragma unroll
    for (int j = 0; j < SHARE; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int m = 8 * j + lane % 4 * 2 + i % 2, row = first + lane / 4 + i / 2 * 8;
        const float s = IN_BLOCKS ? 1.0f : scales[i / 2];
        if (m < m_here && row < p.n) ((float*)p.y)[(long long)(first_m + m) * p.n + row] = acc[j][i] * s * whole;
      }
    return;
  }
  const int n = first + lane % 2 * 8;
  // Halves of 32 bytes change places in the lower four of eight rows, so that these go to all banks.
  const u32 to = shared_address(turned) + lane / 16 * TURNED_TILE + lane % 8 * 32 + (lane / 8 + lane / 4) % 2 * 16;
  const u8* from = turned + lane / 2 * 32 + (lane + lane / 8) % 2 * 16;
#pragma unroll
  for (int j0 = 0; j0 < SHARE; j0 += OUT_TILES) {
    __syncwarp();
#pragma unroll
    for (int j = j0; j < j0 + OUT_TILES && j < SHARE; j += 2) {
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {  // of tile j rows g and g + 8, then those of the next tile
        const float* pair = acc[j + i / 2 < SHARE ? j + i / 2 : j] + i % 2 * 2;
        const float s = IN_BLOCKS ? 1.0f : scales[i % 2];
        words[i] = pack_as<OUT == 1>(pair[0] * s * whole, pair[1] * s * whole);
      }
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                   ::"r"(to + (j - j0) * TURNED_TILE), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                   "r"(words[3]) : "memory");
    }
    __syncwarp();
#pragma unroll
    for (int j = j0; j < j0 + OUT_TILES && j < SHARE; j += 2) {
      const int m = 8 * j + lane / 2;
      if (m >= 8 * SHARE || m >= m_here || n >= p.n) continue;
      const u16* here = (const u16*)(from + (j - j0) * TURNED_TILE);
      u16* y = (u16*)p.y + (long long)(first_m + m) * p.n + n;
      if (p.n % 8 == 0) {
        *(uint4*)y = *(const uint4*)here;
      } else {
        for (int e = 0; e < 8 && n + e < p.n; e++) y[e] = here[e];
      }
    }
  }
}

// A warp's share of the sums of all slices, in order. They go through shared memory as they lie in
// registers.
__device__ __forceinline__ void add_slices(float4* sums, const float (*acc)[4], float (*all)[4], int warp,
                                           int first, int lane) {
#pragma unroll
  for (int j = 0; j < NT; j++)
    sums[(warp * NT + j) * 32 + lane] = make_float4(acc[j][0], acc[j][1], acc[j][2], acc[j][3]);
  if constexpr (KC > 1) {
    cluster_sync();
  } else {
    sync_workers();
  }
#pragma unroll
  for (int i = 0; i < SHARE; i++) {
    const int j = min(first + i, NT - 1);
#pragma unroll
    for (int e = 0; e < 4; e++) all[i][e] = 0.0f;
#pragma unroll
    for (int s = 0; s < SLICES; s++) {
      const float4 f = peer((const float*)(sums + ((s % WK * WN + warp % WN) * NT + j) * 32 + lane), s / WK);
      all[i][0] += f.x, all[i][1] += f.y, all[i][2] += f.z, all[i][3] += f.w;
    }
  }
}

// The same of a cluster's blocks, of which this is number `mine`: what another one adds up is sent to where
// its warp of these rows had its stages. Of the warp's barriers the first says that the others' are free,
// the second that all of them have sent.
__device__ __forceinline__ u32 address_in(u32 shared, int rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
  return there;
}
__device__ __forceinline__ void await_cluster(u32 barrier) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;}" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void tell_others(u32 barrier, int mine) {
#pragma unroll
  for (int s = 0; s < KC; s++)
    if (s != mine)
      asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
                   ::"r"(address_in(barrier, s)) : "memory");
}
__device__ __forceinline__ void exchange(const u8* received, u32 barriers, const float (*acc)[4],
                                         float (*all)[4], int mine, int lane) {
  const int tiles = min(max(NT - mine * SHARE, 0), SHARE);
  if (lane == 0) expect(barriers + 8, (KC - 1) * 512 * tiles);
  await_cluster(barriers);
  float own[SHARE][4];
#pragma unroll
  for (int s = 0; s < KC; s++) {
    const u32 to = address_in(shared_address(received), s) + ((mine - (mine > s)) * SHARE * 32 + lane) * 16;
    const u32 sent = address_in(barriers + 8, s);
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
      const int j = s * SHARE + i;
      if (s == mine) {
#pragma unroll
        for (int e = 0; e < 4; e++) own[i][e] = acc[min(j, NT - 1)][e];
      } else if (j < NT) {
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
                     " [%0], {%1, %2, %3, %4}, [%5];"
                     ::"r"(to + i * 512), "f"(acc[j][0]), "f"(acc[j][1]), "f"(acc[j][2]), "f"(acc[j][3]),
                     "r"(sent) : "memory");
      }
    }
  }
  await_cluster(barriers + 8);
#pragma unroll
  for (int i = 0; i < SHARE; i++) {
    float others[KC][4];
#pragma unroll
    for (int s = 0; s < KC - 1; s++) {
      const float4 f = ((const float4*)received)[(s * SHARE + i) * 32 + lane];
      others[s][0] = f.x, others[s][1] = f.y, others[s][2] = f.z, others[s][3] = f.w;
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
      all[i][e] = 0.0f;
#pragma unroll
      for (int s = 0; s < KC; s++) {
        const float before = others[s > 0 ? s - 1 : 0][e], after = others[s < KC - 1 ? s : 0][e];
        all[i][e] += s == mine ? own[i][e] : s > mine ? before : after;
      }
    }
  }
}

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
  // Start address, bytes between groups of 8 rows (1024), and the 128-byte swizzle.
  const u64 x_tiles = (u64)((x_at & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
  int x_stage = 0;
  u32 parity = 0;
  bool begun = false;
  for (int tile = first_tile; tile < tiled.all; tile += step) {
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
      for (int i = 0; i < 4; i++)  // so that none sees a constant: else ptxas (13.0) lets products wait
        asm volatile("mov.f32 %0, 0f00000000;" : "=f"(acc[j][i]));
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
            if constexpr (FOLDS) {
              const u32 s = fma2(factors[half].of[HALVES ? q / 2 : 0], UP2, MINUS_ZERO2);
              pair = fma2(pair, s, fma2(s, MINUS_SIGN, MINUS_ZERO2));
            } else if constexpr (IN_BLOCKS)
              pair = fma2(pair, factors[half].of[HALVES ? q / 2 : 0], MINUS_ZERO2);
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
