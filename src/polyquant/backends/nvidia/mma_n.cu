// As mma.cu, for a weight stored (in, out): lines of codes packed along n, one for each k. For bf16.
//
// A warp owns 64 columns n. Thread (g, t) of it reads the codes of 8 of them, 8 g to 8 g + 7, in 4
// lines of 16, 4 t to 4 t + 3; two lines' words, woven together, become pairs of numbers along k by
// the same decoding, are multiplied by the pair's scales, rounded to bf16, and are the left operand.
// The WN warps of a slice of k copy CHUNK lines and their rows of x to shared memory, STAGES deep;
// 16-byte pieces of a line are permuted so that the quad's lines lie in different banks. Scales and
// offsets are copied with the codes; where a line's begin at other than whole four bytes, they are read
// where they lie, a chunk ahead.
//
// The caller guarantees: BITS is 4 or 8, and 4 beside an integer zero point; blocks are of 8 values or
// a multiple along n, block_rows lines high; codes past the end of a line may be anything.

constexpr int LINE_WORDS = BITS / 4;                  // of a thread in one line
constexpr int LINE_BYTES = WN * 32 * LINE_WORDS;      // of a block of threads
constexpr int X_PITCH = CHUNK * 2 + 32;
constexpr int CODES_STAGE = CHUNK * LINE_BYTES;

// Numbers of TYPE of a line: those of the columns of a block of threads.
template <int TYPE, int PIECE>
struct Line {
  static constexpr int WIDTH = 64 * WN, COUNT = BLOCK >= WIDTH ? 1 : WIDTH / BLOCK;
  static constexpr int BYTES = COUNT * size_of(TYPE), PIECES = BYTES / PIECE;
  static constexpr bool IS_COPIED = (BLOCK % WIDTH == 0 || WIDTH % BLOCK == 0) && PIECE >= 4;
  static constexpr int STAGE = IS_COPIED ? CHUNK * BYTES : 0;

  // Those of CHUNK lines from k on; zeros past the ends.
  static __device__ __forceinline__ void fetch(u32 to, const u8* lines, long long stride, int line_bytes,
                                               int rows_per, int k, int end, int member) {
    if constexpr (!IS_COPIED) return;
    const int first = line_block() * WIDTH / BLOCK * size_of(TYPE);
#pragma unroll
    for (int i = member; i < CHUNK * PIECES; i += 32 * WN) {
      const int row = k + i / PIECES, byte = first + i % PIECES * PIECE;
      const u8* from = lines + (rows_per == 1 ? row : row / rows_per) * stride + byte;
      const int left = row < end ? max(0, min(PIECE, line_bytes - byte)) : 0;
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                   ::"r"(to + i * PIECE), "l"(from), "n"(IS_COPIED ? PIECE : 4), "r"(left) : "memory");
    }
  }
};
typedef Line<SCALE, SCALE_PIECE> OfScales;
typedef Line<OFFSET_TYPE, OFFSET_PIECE> OfOffsets;
constexpr bool OFFSETS_COPIED = OFFSET == INTEGER_ZERO && OfOffsets::IS_COPIED;
constexpr int X_IN_STAGE = CODES_STAGE + OfScales::STAGE + (OFFSETS_COPIED ? OfOffsets::STAGE : 0);
constexpr int STAGE = X_IN_STAGE + COLUMNS * X_PITCH;
static_assert(LINE_BYTES >= 128 && RT == 4, "a warp's columns");

// Codes of two lines as the words of pairs (line, line) of 4 columns: `half` says which.
__device__ __forceinline__ void weave(const u32* low, const u32* high, int half, u32& w0, u32& w1) {
  if constexpr (BITS == 8) {
    w0 = __byte_perm(low[half], high[half], NATURAL ? 0x5140 : 0x5410);
    w1 = __byte_perm(low[half], high[half], NATURAL ? 0x7362 : 0x7632);
  } else if constexpr (KIND == LOOKUP) {
    w0 = half ? (low[0] >> 4 & 0x0F0F0F0Fu) | (high[0] & 0xF0F0F0F0u)
              : (low[0] & 0x0F0F0F0Fu) | (high[0] & 0x0F0F0F0Fu) << 4;
  } else {
    w0 = __byte_perm(low[0], high[0], half ? 0x7632 : 0x5410);
  }
}

// The column, of a thread's 8, whose pair is number i of a half.
__device__ __forceinline__ int column_of(int pair) {
  return BITS == 4 && KIND == LOOKUP ? pair % 4 * 2 + pair / 4 : pair;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) matmul(const Operands p) {
  extern __shared__ __align__(16) u8 shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int slice = warp / WN, across = warp % WN, member = across * 32 + lane;
  const int first_m = first_row(p, row_tile()), m_here = min(p.m - first_m, COLUMNS);
  u32* lut = (u32*)shared;
  u8* stages = shared + LUT_BYTES + slice * STAGES * STAGE;
  const u32 sign = both(SIGN) | (u32)(p.m >> 31);  // a constant that none can see
  float undo = UNIT;

  const Operands mine = of_batch(p, row_tile());
  const Activations<32 * WN> x(mine, first_m, m_here, member);
  auto place = [](int row, int piece) { return row * X_PITCH + piece * 16; };
  auto stage_at = [&](int stage) { return shared_address(stages) + stage * STAGE; };
  auto fetch_codes = [&](u32 to, int chunk) {
    constexpr int PIECES = LINE_BYTES / CODE_PIECE, EACH = 16 / CODE_PIECE, APART = 32 * WN / PIECES;
    static_assert(32 * WN % PIECES == 0, "a thread keeps its place along the line");
    const int piece = member % PIECES, byte = line_block() * LINE_BYTES + piece * CODE_PIECE;
    const u8* from = mine.codes + (chunk * CHUNK + member / PIECES) * p.code_stride + byte;
#pragma unroll
    for (int i = 0; i < CHUNK / APART; i++, from += APART * p.code_stride) {
      const int line = member / PIECES + i * APART;
      const int at = line * LINE_BYTES + (piece / EACH ^ line / 4 % 4 * 2) * 16 + piece % EACH * CODE_PIECE;
      copy<CODE_PIECE>(to + at, from, chunk * CHUNK + line < p.k && byte < p.code_line);
    }
  };

  const int first_n = (line_block() * WN + across) * 64 + 8 * g;
  const long long block = min(first_n, p.n - 1) / BLOCK;
  // Scales of a thread's lines of a chunk, and four zero points in a word.
  auto numbers_at = [&](int k, float (*scales)[4], u32* zeros) {
    const bool plain = p.block_rows == 1 && k + CHUNK <= p.k;
    const u8* scale = mine.scales + (plain ? k : 0) * p.scale_stride + block * size_of(SCALE);
    const u8* offset = mine.offsets + (plain ? k : 0) * p.offset_stride + block;
#pragma unroll
    for (int i = 0; i < CHUNK / 16 * 4; i++) {
      int row = i / 4 * 16 + i % 4;
      if (!plain) row = min(k + row, p.k - 1) / p.block_rows;
      if constexpr (!OfScales::IS_COPIED) scales[i / 4][i % 4] = number<SCALE>(scale + row * p.scale_stride);
      if constexpr (OFFSET == INTEGER_ZERO && !OFFSETS_COPIED) {
        const u32 zero = offset[row * p.offset_stride];
        zeros[i / 4] = (i % 4 ? zeros[i / 4] : 0) | zero << i % 4 * 8;
      }
    }
  };

  auto fetch_numbers = [&](u32 to, int chunk) {
    OfScales::fetch(to + CODES_STAGE, mine.scales, p.scale_stride, p.scale_line, p.block_rows, chunk * CHUNK,
                    p.k, member);
    if constexpr (OFFSETS_COPIED)
      OfOffsets::fetch(to + CODES_STAGE + OfScales::STAGE, mine.offsets, p.offset_stride, p.offset_line,
                       p.block_rows, chunk * CHUNK, p.k, member);
  };

  float acc[RT][NT][4] = {};
  const int first_chunk = blockIdx.z * WK + slice, apart = WK * KC;
  const int count = (p.chunks - first_chunk + apart - 1) / apart;
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++)
    if (s < count) {
      fetch_codes(stage_at(s), first_chunk + s * apart);
      fetch_numbers(stage_at(s), first_chunk + s * apart);
    }
  if constexpr (KIND == LOOKUP) {
    undo = build_lut(lut, p.table);
    __syncthreads();
  }
  float scales[CHUNK / 16][4], next_scales[CHUNK / 16][4];
  u32 zeros[CHUNK / 16], next_zeros[CHUNK / 16];
  numbers_at(first_chunk * CHUNK + 4 * t, scales, zeros);
  follow();
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < count) x.fetch(stage_at(s) + X_IN_STAGE, first_chunk + s * apart, place);
    asm volatile("cp.async.commit_group;");
  }
  for (int it = 0; it < count; it++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    sync_slice(slice);  // all have this chunk, and none is still at the one overwritten next
    const int next = it + STAGES - 1, k = (first_chunk + it * apart) * CHUNK + 4 * t;
    if (next < count) {
      fetch_codes(stage_at(next % STAGES), first_chunk + next * apart);
      fetch_numbers(stage_at(next % STAGES), first_chunk + next * apart);
      x.fetch(stage_at(next % STAGES) + X_IN_STAGE, first_chunk + next * apart, place);
    }
    asm volatile("cp.async.commit_group;");
    numbers_at(k + apart * CHUNK, next_scales, next_zeros);

    const u8* codes = stages + it % STAGES * STAGE;
    const u8* x_at = codes + X_IN_STAGE + t * 8;
    const int place = BLOCK >= 64 * WN ? 0 : (across * 64 + 8 * g) / BLOCK;  // a thread's block of a line
#pragma unroll
    for (int s = 0; s < CHUNK / 16; s++) {
      u32 words[4][LINE_WORDS];
      const int byte = (across * 8 + g) * 4 * LINE_WORDS;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const u8* from = codes + (16 * s + 4 * t + j) * LINE_BYTES + (byte / 16 ^ 2 * t) * 16 + byte % 16;
        if constexpr (LINE_WORDS == 2) {
          *(uint2*)words[j] = *(const uint2*)from;
        } else {
          words[j][0] = *(const u32*)from;
        }
      }
      u32 pairs[2][8], zero = zeros[s];
      float scale[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int line = 16 * s + 4 * t + j;
        const u8* from = codes + CODES_STAGE + line * OfScales::BYTES + place * size_of(SCALE);
        scale[j] = OfScales::IS_COPIED ? number<SCALE>(from) : scales[s][j];
        if constexpr (OFFSETS_COPIED)
          zero = (j ? zero : 0) | (u32)codes[CODES_STAGE + OfScales::STAGE + line * OfOffsets::BYTES + place] << 8 * j;
      }
#pragma unroll
      for (int j = 0; j < 2; j++) {
        u32 minus = MINUS_SIGN;
        if constexpr (OFFSET == INTEGER_ZERO)
          minus = minus_zero(both(SIGN) + __byte_perm(zero >> 16 * j, 0, 0x4140));
        const u32 s2 = pack(scale[2 * j], scale[2 * j + 1]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          u32 w0, w1 = 0;
          weave(words[2 * j], words[2 * j + 1], half, w0, w1);
          if constexpr (INTEGERS) {
            numbers_of(make_uint2(w0, w1), sign, minus, pairs[j] + 4 * half);
          } else {
            numbers_of(w0, w1, 0, 0, 0.0f, lut, pairs[j] + 4 * half);
          }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) pairs[j][i] = fma2(pairs[j][i], s2, MINUS_ZERO2);
      }
#pragma unroll
      for (int j = 0; j < NT; j++) {
        const uint2 b = *(const uint2*)(x_at + (8 * j + g) * X_PITCH + s * 32);
#pragma unroll
        for (int r = 0; r < RT; r++)
          mma(acc[r][j], pairs[0][2 * r], pairs[0][2 * r + 1], pairs[1][2 * r], pairs[1][2 * r + 1], b.x, b.y);
      }
    }
#pragma unroll
    for (int i = 0; i < CHUNK / 16; i++) {
      zeros[i] = next_zeros[i];
#pragma unroll
      for (int j = 0; j < 4; j++) scales[i][j] = next_scales[i][j];
    }
  }

  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  float* sums = (float*)(shared + LUT_BYTES);
#pragma unroll
  for (int r = 0; r < RT; r++)
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int column = 8 * j + 2 * t + i % 2, row = across * 64 + 8 * g + column_of(2 * r + i / 2);
        if (column < m_here) sums[(slice * COLUMNS + column) * SUMS_LINE + row] = acc[r][j][i];
      }
  finish(mine, sums, first_m, m_here, undo);
}
