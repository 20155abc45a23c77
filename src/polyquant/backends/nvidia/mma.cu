// y[m, n] = sum_k x[m, k] * value(code[n, k]) * scale[n / BLOCK_ROWS, k / BLOCK], on tensor cores.
//
// The codes are the rows of the left operand of mma.m16n8k16, the activations its 8 columns: up to
// 8 rows of x cost what one costs. Codes enter the multiplier exactly (bf16 or f16 holds them all),
// sums are float32, and a block's scale multiplies the block's sum, so no weight is ever rounded.
//
// Reads the canonical bytes: lines of codes packed along k, little-endian. A warp owns 16 * RT rows
// of the weight and every (WK * KC)-th chunk of CHUNK values of k. It copies codes, scales and offsets
// to shared memory with cp.async, STAGES deep, for itself alone; the WN warps of one k slice share
// the chunk of x, unless it is one row (OWN). A cluster of KC blocks of threads has WK * KC slices, which are added in order at
// the end, so that runs give the same bits.
//
// Of each 32 values along k thread t of a quad holds 8 consecutive ones, 8 t to 8 t + 7. Since a sum
// does not care about its order, they enter as the pairs that codes fall into by themselves: see
// few.cuh; natural order where that is cheaper (NATURAL). x is paired to match.
//
// The caller guarantees: x is (M, K) with rows of XK >= K elements, XK a multiple of 8, 16-byte
// aligned; lines of codes are a multiple of CODE_PIECE bytes, those of scales of SCALE_PIECE. Codes
// and scales past the end of a line are read as zero, x past K must be zero or absent.
//
// Given by -D: F16 BITS KIND MANTISSA BLOCK SCALE OFFSET OFFSET_TYPE CODE_PIECE SCALE_PIECE
// OFFSET_PIECE X_ROWS LUT_STEP PLANES OUT BATCHED, named in planning.py, and the tile sizes, named
// in tiles.py.

// -- products -------------------------------------------------------------------------------------

// Rows g and g + 8 of 32 values of k: pairs of both rows times the pairs of x.
__device__ __forceinline__ void multiply(float* d, const u32* low, const u32* high, const u32* b) {
  mma(d, low[0], high[0], low[1], high[1], b[0], b[1]);
  mma(d, low[2], high[2], low[3], high[3], b[2], b[3]);
}

template <bool IN_ORDER>
__device__ __forceinline__ void x_pairs(const u8* x, u32* b) {
  uint4 v = *(const uint4*)x;
  if constexpr (IN_ORDER) {
    b[0] = v.x, b[1] = v.y, b[2] = v.z, b[3] = v.w;
  } else if constexpr (FOURS) {
    b[0] = __byte_perm(v.x, v.y, 0x5410), b[1] = __byte_perm(v.x, v.y, 0x7632);
    b[2] = __byte_perm(v.z, v.w, 0x5410), b[3] = __byte_perm(v.z, v.w, 0x7632);
  } else {
    b[0] = __byte_perm(v.x, v.z, 0x5410), b[1] = __byte_perm(v.x, v.z, 0x7632);
    b[2] = __byte_perm(v.y, v.w, 0x5410), b[3] = __byte_perm(v.y, v.w, 0x7632);
  }
}

// One row of x each warp of enough rows of the weight copies for itself, and puts in order once.
constexpr bool OWN = X_ROWS == 1 && (WN == 1 || RT > 1), ORDERS = OWN && !NATURAL;

// It leaves seven columns: there each block along k has one of its own, beside zeros, so that a thread
// closes two of eight blocks, once. (e5m2 has infinities, which zeros would make NaN.)
constexpr bool SPREADS = X_ROWS == 1 && IN_BLOCKS && BLOCK < CHUNK && KIND != E5M2;
constexpr int SPAN = !SPREADS ? 1 : GROUPS < BLOCK / 4 ? GROUPS : BLOCK / 4;  // groups of eight blocks
constexpr int ZERO_BYTES = SPREADS ? CHUNK * 2 : 0;

constexpr bool FEW_NUMBERS = RT * ((SCALE_BYTES + 3) / 4 + (OFFSET_BYTES + 3) / 4) <= 16;

// A power of two makes numbers of a minifloat's bits (see few.cuh). That times a scale makes weights of
// them, exactly: under e4m3 over 128, for its largest numbers; under powers of two where all of a chunk
// are from 2^-63 to 1, else its blocks are closed (tensor cores take subnormal numbers for zero).
constexpr bool POWERS = SCALE == UE8M0_T && !F16 && !HALVES && FEW_NUMBERS && NT <= 2;
constexpr bool FOLDS = KIND == MINIFLOAT && IN_BLOCKS && !SPREADS && OFFSET == NO_OFFSET &&
                       (POWERS || (SCALE == UE4M3_T && MANTISSA <= 3));
constexpr u32 OVER = 7, LEFT = (POWER >> EXPONENT) + 127 - (F16 ? 15 : 127) - OVER;  // of float32

// With many rows of x it is less work to scale the numbers, rounded to bf16, than each block's sums.
// So it is for any number of them where bf16 holds the products anyway: of e4m3 and up to 4 bits.
constexpr bool EXACT = SCALE == UE4M3_T && OFFSET == NO_OFFSET && BITS <= 4 && (INTEGERS || MANTISSA == 1);
constexpr bool SCALED = IN_BLOCKS && !F16 && !SUMS_X && !FOLDS && !SPREADS && (EXACT || (PLANES == 1 && NT > 2));
constexpr bool CLOSES = IN_BLOCKS && !SCALED && !FOLDS;

// Sums that do not wait for each other, added up at the end.
constexpr int CHAINS = RT * NT == 1 && !HALVES ? 4 : RT * NT <= 2 ? 2 : 1;
constexpr int EVEN = CHAINS > 1 ? CHAINS : 2, SETS = CLOSES || SPREADS ? 1 : CHAINS;

// A chunk's scales and offsets of a thread's rows in registers, where these are not too many.
constexpr bool HELD = (CLOSES || FOLDS || (SCALED && EXACT)) && FEW_NUMBERS && (!SPREADS || OFFSET == INTEGER_ZERO);
// e4m3 scales of two groups of 32 values are found at once.
constexpr bool BY_TWO = HELD && GROUPS > 1 && (SCALED || (FOLDS && !POWERS));

// Two neighbouring numbers.
template <int TYPE>
__device__ __forceinline__ void numbers_of_two(const u8* p, float* f) {
  u32 two;
  if constexpr (TYPE == UE4M3_T) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"(*(const u16*)p));
  } else if constexpr (TYPE == F16_T) {
    two = *(const u32*)p;
  }
  if constexpr (TYPE == UE4M3_T || TYPE == F16_T) {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(f[0]), "=f"(f[1]) : "r"(two));
  } else {
    f[0] = number<TYPE>(p), f[1] = number<TYPE>(p + size_of(TYPE));
  }
}

constexpr int X_PITCH = CHUNK * 2 + 64;  // a quarter of a warp reads two rows: other banks
constexpr int X_STAGE = X_ROWS * X_PITCH, SLICE_STAGE = WN * WARP_STAGE + (OWN ? WN : 1) * X_STAGE;
constexpr int APART = WARP_STAGE + (OWN ? X_STAGE : 0);  // of a slice's warps

// The number of one half in both.
__device__ __forceinline__ u32 half_twice(u32 two, int half) {
  return __byte_perm(two, two, half ? 0x3232 : 0x1010);
}

// Two e4m3 scales, the bytes of a word that `at` names: where FOLDS as what makes bits weights.
__device__ __forceinline__ u32 scales_of_two(u32 word, u32 at) {
  u32 two;
  asm("{.reg .b16 codes, rest; .reg .b32 at; prmt.b32 at, %1, 0, %2; mov.b32 {codes, rest}, at;"
      " cvt.rn.f16x2.e4m3x2 %0, codes;}" : "=r"(two) : "r"(word), "r"(at));
  return fma2(from_f16(two), FOLDS ? both(LEFT - 127 + (F16 ? 15 : 127) << EXPONENT) : ONE2, MINUS_ZERO2);
}

template <bool YES>
struct Is {
  static constexpr bool value = YES;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) matmul(const Operands p) {
  extern __shared__ __align__(16) u8 shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int slice = warp / WN, across = warp % WN, g = lane / 4, t = lane % 4;
  const int first = line_block() * (ROWS * WN) + across * ROWS;
  const int first_m = first_row(p, row_tile()), m_here = min(p.m - first_m, COLUMNS);
  u32* lut = (u32*)shared;
  u8* stages = shared + LUT_BYTES + ZERO_BYTES + slice * STAGES * SLICE_STAGE + (OWN ? across * APART : 0);
  const u32 magic = both(INTEGERS ? SIGN : MAGIC | SIGN) | (u32)(p.m >> 31);  // a constant that none can see
  float undo = FOLDS && !POWERS ? 1 << OVER : UNIT;

  Weight weight(of_batch(p, row_tile()), first, lane);
  Activations<OWN ? 32 : 32 * WN> x(of_batch(p, row_tile()), first_m, m_here, OWN ? lane : across * 32 + lane);
  weight.hold_addresses();
  hold(x.mine);
  auto place = [](int row, int piece) { return row * X_PITCH + piece * 16; };
  auto x_of = [&](int stage) { return shared_address(stages) + stage * SLICE_STAGE; };
  auto codes_of = [&](int stage) { return x_of(stage) + X_STAGE + (OWN ? 0 : across * APART); };

  const u32 bytes_of_scales = HALVES ? 0x20 + t / 2 * 0x11 : 0x10;
  float acc[SETS][RT][NT][4] = {};
  const int first_chunk = blockIdx.z * WK + slice, apart = WK * KC;
  const int count = (p.chunks - first_chunk + apart - 1) / apart;
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++)
    if (s < count) weight.fetch(codes_of(s), first_chunk + s * apart, lane);
  if (lane < RT) announce_scales(of_batch(p, row_tile()), first + 16 * lane);
  if constexpr (KIND == LOOKUP) undo = build_lut(lut, p.table);
  if constexpr (SPREADS)
    for (int i = threadIdx.x; i < ZERO_BYTES / 16; i += THREADS)
      ((uint4*)(shared + LUT_BYTES))[i] = make_uint4(0, 0, 0, 0);
  if constexpr (KIND == LOOKUP || SPREADS) __syncthreads();
  follow();
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < count) x.fetch(x_of(s), first_chunk + s * apart, place);
    asm volatile("cp.async.commit_group;");
  }
  for (int it = 0; it < count; it++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    if (OWN) __syncwarp();
    else sync_slice(slice);  // all have this chunk, and none is still at the one overwritten next
    const int next = it + STAGES - 1;
    if (next < count) {
      weight.fetch(codes_of(next % STAGES), first_chunk + next * apart, lane);
      x.fetch(x_of(next % STAGES), first_chunk + next * apart, place);
    }
    asm volatile("cp.async.commit_group;");

    if constexpr (ORDERS) {
#pragma unroll
      for (int piece = lane; piece < CHUNK / 8; piece += 32) {
        u32 b[4];
        uint4* at = (uint4*)(stages + it % STAGES * SLICE_STAGE) + piece;
        x_pairs<false>((const u8*)at, b);
        *at = make_uint4(b[0], b[1], b[2], b[3]);
      }
      __syncwarp();
    }
    const u8* x_at = stages + it % STAGES * SLICE_STAGE + t * 16;
    const u8* codes = stages + it % STAGES * SLICE_STAGE + X_STAGE + (OWN ? 0 : across * APART);
    const u8* scales = codes + ROWS * CODE_PITCH + g * SCALE_PITCH;
    const u8* offsets = codes + ROWS * (CODE_PITCH + SCALE_PITCH) + g * OFFSET_PITCH;
    const u8* mine = codes + lane % 16 * CODE_PITCH + lane / 16 * 16;  // see load_words
    codes += g * CODE_PITCH;
    Numbers<SCALE_BYTES> held_scales[2 * RT];
    Numbers<OFFSET_BYTES> held_offsets[2 * RT];
    if constexpr (HELD) {
#pragma unroll
      for (int i = 0; i < 2 * RT; i++) {
        held_scales[i].load(scales + 8 * i * SCALE_PITCH);
        held_offsets[i].load(offsets + 8 * i * OFFSET_PITCH);
        if (HALVES && OFFSET == INTEGER_ZERO && t > 1) held_offsets[i].second();
      }
    }
    // Those of rows 8 i + g, for a block of the chunk.
    auto scale_of = [&](int i, int block) {
      if constexpr (HELD) return number<SCALE>(held_scales[i], block);
      return number<SCALE>(scales + 8 * i * SCALE_PITCH + block * size_of(SCALE));
    };
    auto offset_of = [&](int i, int block) {
      if constexpr (HELD) return number<OFFSET_TYPE>(held_offsets[i], block);
      return number<OFFSET_TYPE>(offsets + 8 * i * OFFSET_PITCH + block * size_of(OFFSET_TYPE));
    };
    auto zeros_of = [&](int i, int block) {
      if constexpr (HELD) return __byte_perm(held_offsets[i].words[block / 4], 0, 0x4040 | block % 4 * 0x0101);
      return both(1) * offsets[8 * i * OFFSET_PITCH + block];
    };
    // e4m3 scales of rows 8 i + g for two groups of 32 values, the second one's in the upper half.
    auto scales_of = [&](int i, int group) {
      const int own = HALVES ? 2 * group : BLOCK >= CHUNK ? 0 : group * 32 / BLOCK;
      const int next = HALVES ? 0 : BLOCK >= CHUNK ? 0 : (group + 1) * 32 / BLOCK;
      return scales_of_two(held_scales[i].words[own / 4], HALVES ? bytes_of_scales : own % 4 | next % 4 << 4);
    };
    // What makes bits of rows 8 i + g weights.
    auto power_of = [&](int i, int block) {
      if constexpr (POWERS) {
        const u32 two = __byte_perm(held_scales[i].words[block / 4], 0, 0x4040 | block % 4 * 0x0101);
        return two * (1u << EXPONENT) + both(POWER - (127 << EXPONENT));
      }
      const float scale = scale_of(i, block) * __uint_as_float(LEFT << 23);
      return pack(scale, scale);
    };
    u32 words[RT][GROUPS][2], two_scales[2 * RT];
    if constexpr (BITS == 4) {
#pragma unroll
      for (int c = 0; c < GROUPS; c += 2)
#pragma unroll
        for (int r = 0; r < RT; r++) load_words(mine + 16 * r * CODE_PITCH + c * 16, &words[r][c]);
    }
    const u32 as_is = INTEGERS ? MINUS_SIGN : KIND == MINIFLOAT ? both(POWER) : subtrahend(SIGN);
    // 8 codes of row 8 i + g as pairs of numbers; `own`: their block, whose zero point is taken off.
    auto decoded = [&](int i, int group, int own, u32 minus, u32* a) {
      float zero = 8388608.0f + SIGN;
      if constexpr (OFFSET == INTEGER_ZERO) {
        const u32 zeros = both(SIGN) + zeros_of(i, own);
        minus = INTEGERS ? minus_zero(zeros) : subtrahend(0) + zeros;
        zero = __uint_as_float(0x4B000000u | zeros & 0xFFFF);
      }
      few(codes + 8 * i * CODE_PITCH + group * 4 * BITS, t, words[i / 2][group][i % 2], magic, minus, zero, lut, a);
    };
    if constexpr (SPREADS) {
      const u8* none = shared + LUT_BYTES + t * 16;
      const int its = HALVES ? (g % 2 == t / 2 ? g / 2 : -1) : g;  // of eight blocks (four groups), that of its column
#pragma unroll
      for (int c = 0; c < GROUPS; c += SPAN) {
        float d[CHAINS][RT][4] = {}, ones[CHAINS][4] = {};
#pragma unroll
        for (int e = 0; e < SPAN; e++) {
          const int own = HALVES ? 2 * (c + e) + (HELD ? 0 : t / 2) : (c + e) * 32 / BLOCK;
          const int left = 2 * e % EVEN % CHAINS, right = (2 * e + 1) % EVEN % CHAINS;
          u32 b[4];
          x_pairs<NATURAL || ORDERS>(((HALVES ? e : e * 32 / BLOCK) == its ? x_at : none) + (c + e) * 64, b);
#pragma unroll
          for (int r = 0; r < RT; r++) {
            u32 a[2][4];
#pragma unroll
            for (int half = 0; half < 2; half++) decoded(2 * r + half, c + e, own, as_is, a[half]);
            mma(d[left][r], a[0][0], a[1][0], a[0][1], a[1][1], b[0], b[1]);
            mma(d[right][r], a[0][2], a[1][2], a[0][3], a[1][3], b[2], b[3]);
          }
          if constexpr (SUMS_X) {
            mma(ones[left], UNIT_PART2, UNIT_PART2, UNIT_PART2, UNIT_PART2, b[0], b[1]);
            mma(ones[right], UNIT_PART2, UNIT_PART2, UNIT_PART2, UNIT_PART2, b[2], b[3]);
          }
        }
#pragma unroll
        for (int h = 1; h < CHAINS; h++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int r = 0; r < RT; r++) d[0][r][i] += d[h][r][i];
            ones[0][i] += ones[h][i];
          }
        const int block = (HALVES ? 2 * c : c * 32 / BLOCK) + 2 * t % min(8, PER_CHUNK);
#pragma unroll
        for (int i = 0; i < 2 * RT; i++) {
          float pair[2];
          numbers_of_two<SCALE>(scales + 8 * i * SCALE_PITCH + block * size_of(SCALE), pair);
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const bool is = PER_CHUNK >= 8 || 2 * t < PER_CHUNK;
            const float s = is ? pair[j] : 0.0f, whole = d[0][i / 2][i % 2 * 2 + j];
            float& to = acc[0][i / 2][0][i % 2 * 2];
            if constexpr (!SUMS_X) {
              to = fmaf(whole, s, to);
            } else {
              const float o = is ? offset_of(i, block + j) : 0.0f;
              if constexpr (OFFSET == FLOAT_ZERO) to = fmaf(__fsub_rn(whole, __fmul_rn(o, ones[0][j])), s, to);
              if constexpr (OFFSET == BIAS) to += __fadd_rn(__fmul_rn(whole, s), __fmul_rn(o, ones[0][j]));
            }
          }
        }
      }
      continue;
    }
    auto multiply_chunk = [&](auto by_blocks) {
      constexpr bool closes = CLOSES || by_blocks.value;
      constexpr int BLOCK_GROUPS = !closes || BLOCK >= CHUNK ? GROUPS : (HALVES ? 1 : BLOCK / 32);
#pragma unroll
      for (int c = 0; c < GROUPS; c += BLOCK_GROUPS) {
        float d[HALVES ? 2 : 1][RT][NT][4] = {};
        float ones[HALVES ? 2 : 1][NT][4] = {};
        const int block = HALVES ? 2 * c : c / BLOCK_GROUPS;
#pragma unroll
        for (int e = 0; e < BLOCK_GROUPS; e++) {
          const int own = HALVES ? 2 * (c + e) + (HELD ? 0 : t / 2) : (BLOCK >= CHUNK ? 0 : (c + e) * 32 / BLOCK);
          if constexpr (BY_TWO)
            if ((c + e) % 2 == 0)
#pragma unroll
              for (int i = 0; i < 2 * RT; i++) two_scales[i] = scales_of(i, c + e);
          u32 b[NT][4];
#pragma unroll
          for (int j = 0; j < NT; j++)
            x_pairs<NATURAL || ORDERS>(x_at + min(8 * j + g, X_ROWS - 1) * X_PITCH + (c + e) * 64, b[j]);
#pragma unroll
          for (int r = 0; r < RT; r++) {
            u32 a[2][4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
              u32 minus = as_is;
              if constexpr (FOLDS && !closes)
                minus = BY_TWO ? half_twice(two_scales[2 * r + half], (c + e) % 2) : power_of(2 * r + half, own);
              decoded(2 * r + half, c + e, own, minus, a[half]);
              if constexpr (SCALED) {
                const float scale = BY_TWO ? 1.0f : scale_of(2 * r + half, own);
                const u32 twice = BY_TWO ? half_twice(two_scales[2 * r + half], (c + e) % 2) : pack(scale, scale);
#pragma unroll
                for (int i = 0; i < 4; i++) a[half][i] = fma2(a[half][i], twice, MINUS_ZERO2);
              }
            }
#pragma unroll
            for (int j = 0; j < NT; j++) {
              if constexpr (!closes) {
                mma(acc[2 * (c + e) % EVEN % SETS][r][j], a[0][0], a[1][0], a[0][1], a[1][1], b[j][0], b[j][1]);
                mma(acc[(2 * (c + e) + 1) % EVEN % SETS][r][j], a[0][2], a[1][2], a[0][3], a[1][3], b[j][2], b[j][3]);
              } else if constexpr (HALVES) {
                u32 left[4], right[4];
#pragma unroll
                for (int i = 0; i < 4; i++) left[i] = t < 2 ? b[j][i] : 0, right[i] = t < 2 ? 0 : b[j][i];
                multiply(d[0][r][j], a[0], a[1], left);
                multiply(d[HALVES][r][j], a[0], a[1], right);
              } else {
                multiply(d[0][r][j], a[0], a[1], b[j]);
              }
            }
          }
          if constexpr (SUMS_X) {
            constexpr u32 ONES[4] = {UNIT_PART2, UNIT_PART2, UNIT_PART2, UNIT_PART2};
#pragma unroll
            for (int j = 0; j < NT; j++) {
              if constexpr (HALVES) {
                u32 left[4], right[4];
#pragma unroll
                for (int i = 0; i < 4; i++) left[i] = t < 2 ? b[j][i] : 0, right[i] = t < 2 ? 0 : b[j][i];
                multiply(ones[0][j], ONES, ONES, left);
                multiply(ones[HALVES][j], ONES, ONES, right);
              } else {
                multiply(ones[0][j], ONES, ONES, b[j]);
              }
            }
          }
        }
        if constexpr (closes) {
#pragma unroll
          for (int h = 0; h < (HALVES ? 2 : 1); h++) {
            float sum_x[NT][2];
#pragma unroll
            for (int j = 0; j < NT; j++) sum_x[j][0] = ones[h][j][0], sum_x[j][1] = ones[h][j][1];
#pragma unroll
            for (int r = 0; r < RT; r++) {
              float s[2], o[2] = {};
#pragma unroll
              for (int half = 0; half < 2; half++) {
                s[half] = scale_of(2 * r + half, block + h);
                if constexpr (SUMS_X) o[half] = offset_of(2 * r + half, block + h);
              }
              close_block(acc[0][r], d[h][r], sum_x, s, o);
            }
          }
        }
      }
    };
    if constexpr (FOLDS && POWERS) {  // bytes from 64 to 127
      constexpr u32 TOPS = 0xC0C0C0C0u & (SCALE_BYTES < 4 ? (1u << 8 * SCALE_BYTES % 32) - 1 : ~0u);
      u32 others = 0;
#pragma unroll
      for (int i = 0; i < 2 * RT; i++)
#pragma unroll
        for (int j = 0; j < (SCALE_BYTES + 3) / 4; j++) others |= held_scales[i].words[j] ^ 0x40404040u;
      if (__any_sync(~0u, others & TOPS)) {
        multiply_chunk(Is<true>());
        continue;
      }
    }
    if constexpr (FOLDS && HALVES && HELD && !BY_TWO)
#pragma unroll
      for (int i = 0; i < 2 * RT; i++)
        if (t > 1) held_scales[i].second();
    multiply_chunk(Is<false>());
  }

#pragma unroll
  for (int h = 1; h < SETS; h++)
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
      for (int j = 0; j < NT; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[0][r][j][i] += acc[h][r][j][i];
  if constexpr (SPREADS)  // four threads have blocks of a row
#pragma unroll
    for (int i = 0; i < 2 * RT; i++) {
      float& sum = acc[0][i / 2][0][i % 2 * 2];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
    }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  if (!OWN) even_out(slice, count, p.chunks);
  __syncthreads();
  float* sums = (float*)(shared + LUT_BYTES + ZERO_BYTES);
#pragma unroll
  for (int r = 0; r < RT; r++) put_sums(sums, acc[0][r], slice, across * ROWS + 16 * r, m_here, lane);
  finish(of_batch(p, row_tile()), sums, first_m, m_here, undo);
}
