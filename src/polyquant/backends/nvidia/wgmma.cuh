// What wgmma.cu and bytes.cu share: barriers, codes as pairs of numbers, and sums.

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

  // Group c of a line of 128 bytes of 8 bits with the swizzle, `more` bytes on; `line`: where the swizzle
  // has its first 16 bytes, and the thread's place in them.
  __device__ __forceinline__ Group(u32 line, int c, int more) {
#pragma unroll
    for (int q = 0; q < 4; q++) {
      const u32 at = (line ^ (2 * c + q / 2) * 16) + (more + q % 2 * 8);
      if constexpr (KIND == E4M3) {
        asm volatile("ld.shared.u16 %0, [%1];" : "=r"(words[q]) : "r"(at));
      } else {
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[q]) : "r"(at));
      }
    }
  }
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

// A pair of numbers times their scale, a pair too.
__device__ __forceinline__ u32 scaled(u32 pair, u32 factor) {
  if constexpr (!FOLDS) return fma2(pair, factor, MINUS_ZERO2);
  const u32 s = fma2(factor, UP2, MINUS_ZERO2);
  return fma2(pair, s, fma2(s, MINUS_SIGN, MINUS_ZERO2));
}

// -- products -------------------------------------------------------------------------------------

// What wgmma is told of tiles of x: where they begin, bytes between groups of 8 rows (1024), and the
// 128-byte swizzle.
__device__ __forceinline__ u64 tiles_at(u32 x) {
  return (u64)((x & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ __forceinline__ void clear(float (*acc)[4]) {
#pragma unroll
  for (int j = 0; j < NT; j++)
#pragma unroll
    for (int i = 0; i < 4; i++)  // so that none sees a constant: else ptxas (13.0) lets products wait
      asm volatile("mov.f32 %0, 0f00000000;" : "=f"(acc[j][i]));
}

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
