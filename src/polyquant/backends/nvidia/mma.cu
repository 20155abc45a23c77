// y[m, n] = sum_k x[m, k] * value(code[n, k]) * scale[n / BLOCK_ROWS, k / BLOCK], on tensor cores.
//
// The codes are the rows of the left operand of mma.m16n8k16, the activations its 8 columns: up to
// 8 rows of x cost what one costs. Codes enter the multiplier exactly (bf16 or f16 holds them all),
// sums are float32, and a block's scale multiplies the block's sum, so no weight is ever rounded.
//
// Reads the canonical bytes: lines of codes packed along k, little-endian. A warp owns 16 * RT rows
// of the weight and every (WK * KC)-th chunk of CHUNK values of k. It copies codes, scales and offsets
// to shared memory with cp.async, STAGES deep, for itself alone; the WN warps of one k slice share
// the chunk of x. A cluster of KC blocks of threads has WK * KC slices, which are added in order at
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
// OFFSET_PIECE X_ROWS PLANES OUT BATCHED, named in planning.py, and the tile sizes, named in tiles.py.

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

// One row of x is put in order once, not for each row of the weight, where a warp has it for itself.
constexpr bool ORDERS = X_ROWS == 1 && WN == 1 && !NATURAL;

constexpr bool FEW_NUMBERS = RT * ((SCALE_BYTES + 3) / 4 + (OFFSET_BYTES + 3) / 4) <= 16;

// A power of two makes numbers of a minifloat's bits (see few.cuh). That times a scale makes weights of
// them, exactly: under e4m3 over 128, for its largest numbers; under powers of two where all of a chunk
// are from 2^-63 to 1, else its blocks are closed (tensor cores take subnormal numbers for zero).
constexpr bool POWERS = SCALE == UE8M0_T && !F16 && !HALVES && FEW_NUMBERS && NT <= 2;
constexpr bool FOLDS = KIND == MINIFLOAT && IN_BLOCKS && OFFSET == NO_OFFSET &&
                       (POWERS || (SCALE == UE4M3_T && MANTISSA <= 3));
constexpr u32 OVER = 7, LEFT = (POWER >> EXPONENT) + 127 - (F16 ? 15 : 127) - OVER;  // of float32

// With many rows of x it is less work to scale the numbers, rounded to bf16, than each block's sums.
// So it is for any number of them where bf16 holds the products anyway: of e4m3 and up to 4 bits.
constexpr bool EXACT = SCALE == UE4M3_T && OFFSET == NO_OFFSET && BITS <= 4 && (INTEGERS || MANTISSA == 1);
constexpr bool SCALED = IN_BLOCKS && !F16 && !SUMS_X && !FOLDS && (EXACT || (PLANES == 1 && NT > 2));
constexpr bool CLOSES = IN_BLOCKS && !SCALED && !FOLDS;

// A chunk's scales and offsets of a thread's rows in registers, where these are not too many.
constexpr bool HELD = (CLOSES || FOLDS) && FEW_NUMBERS;

constexpr int X_PITCH = CHUNK * 2 + 64;  // a quarter of a warp reads two rows: other banks
constexpr int X_STAGE = X_ROWS * X_PITCH, SLICE_STAGE = WN * WARP_STAGE + X_STAGE;

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
  u8* stages = shared + LUT_BYTES + slice * STAGES * SLICE_STAGE;
  const u32 magic = both(INTEGERS ? SIGN : MAGIC | SIGN) | (u32)(p.m >> 31);  // a constant that none can see
  float undo = FOLDS && !POWERS ? 1 << OVER : UNIT;

  const Weight weight(of_batch(p, row_tile()), first, lane);
  const Activations<32 * WN> x(of_batch(p, row_tile()), first_m, m_here, across * 32 + lane);
  auto place = [](int row, int piece) { return row * X_PITCH + piece * 16; };
  auto x_of = [&](int stage) { return shared_address(stages) + stage * SLICE_STAGE; };
  auto codes_of = [&](int stage) { return x_of(stage) + X_STAGE + across * WARP_STAGE; };

  float acc[RT][NT][4] = {};
  const int first_chunk = blockIdx.z * WK + slice, apart = WK * KC;
  const int count = (p.chunks - first_chunk + apart - 1) / apart;
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++)
    if (s < count) weight.fetch(codes_of(s), first_chunk + s * apart, lane);
  if (lane < RT) announce_scales(of_batch(p, row_tile()), first + 16 * lane);
  if constexpr (KIND == LOOKUP) {
    undo = build_lut(lut, p.table);
    __syncthreads();
  }
  follow();
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < count) x.fetch(x_of(s), first_chunk + s * apart, place);
    asm volatile("cp.async.commit_group;");
  }
  for (int it = 0; it < count; it++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    sync_slice(slice);  // all have this chunk, and none is still at the one overwritten next
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
    const u8* codes = stages + it % STAGES * SLICE_STAGE + X_STAGE + across * WARP_STAGE;
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
    // What makes bits of rows 8 i + g weights.
    auto power_of = [&](int i, int block) {
      if constexpr (POWERS) {
        const u32 two = __byte_perm(held_scales[i].words[block / 4], 0, 0x4040 | block % 4 * 0x0101);
        return two * (1u << EXPONENT) + both(POWER - (127 << EXPONENT));
      }
      const float scale = scale_of(i, block) * __uint_as_float(LEFT << 23);
      return pack(scale, scale);
    };
    u32 words[RT][GROUPS][2];
    if constexpr (BITS == 4) {
#pragma unroll
      for (int c = 0; c < GROUPS; c += 2)
#pragma unroll
        for (int r = 0; r < RT; r++) load_words(mine + 16 * r * CODE_PITCH + c * 16, &words[r][c]);
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
          u32 b[NT][4];
#pragma unroll
          for (int j = 0; j < NT; j++)
            x_pairs<NATURAL || ORDERS>(x_at + min(8 * j + g, X_ROWS - 1) * X_PITCH + (c + e) * 64, b[j]);
#pragma unroll
          for (int r = 0; r < RT; r++) {
            u32 a[2][4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
              u32 minus = INTEGERS ? MINUS_SIGN : KIND == MINIFLOAT ? both(POWER) : subtrahend(SIGN);
              float zero = 8388608.0f + SIGN, scale = 1.0f;
              if constexpr (OFFSET == INTEGER_ZERO) {
                const u32 zeros = both(SIGN) + zeros_of(2 * r + half, own);
                minus = INTEGERS ? minus_zero(zeros) : subtrahend(0) + zeros;
                zero = __uint_as_float(0x4B000000u | zeros & 0xFFFF);
              }
              if constexpr (SCALED) scale = scale_of(2 * r + half, own);
              if constexpr (FOLDS && !closes) minus = power_of(2 * r + half, own);
              few(codes + (16 * r + 8 * half) * CODE_PITCH + (c + e) * 4 * BITS, t,
                  words[r][c + e][half], magic, minus, zero, lut, a[half]);
              if constexpr (SCALED) {
#pragma unroll
                for (int i = 0; i < 4; i++) a[half][i] = fma2(a[half][i], pack(scale, scale), MINUS_ZERO2);
              }
            }
#pragma unroll
            for (int j = 0; j < NT; j++) {
              if constexpr (!closes) {
                multiply(acc[r][j], a[0], a[1], b[j]);
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
              close_block(acc[r], d[h][r], sum_x, s, o);
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
    if constexpr (FOLDS && HALVES && HELD)
#pragma unroll
      for (int i = 0; i < 2 * RT; i++)
        if (t > 1) held_scales[i].second();
    multiply_chunk(Is<false>());
  }

  asm volatile("cp.async.wait_group 0;" ::: "memory");
  even_out(slice, count, p.chunks);
  __syncthreads();
  float* sums = (float*)(shared + LUT_BYTES);
#pragma unroll
  for (int r = 0; r < RT; r++) put_sums(sums, acc[r], slice, across * ROWS + 16 * r, m_here, lane);
  finish(of_batch(p, row_tile()), sums, first_m, m_here, undo);
}
