// Codes as pairs of numbers for mma.cu and mma_n.cu, where k may have any order. It stands after codes.cuh.
//
// The lowest 8 bits of a bf16 alone in it (11 of an f16) count the smallest number there is. So a field
// of them need not be shifted: a power of two makes it the code over UNIT, and the same instruction
// takes off what `minus` has over UNIT. The end undoes UNIT.

constexpr bool INTEGERS =  // but those that less a zero point do not fit bf16
    KIND == UNSIGNED || (KIND == SIGNED && (BITS < 8 || F16 || OFFSET != INTEGER_ZERO));
constexpr float UNIT = !INTEGERS ? 1.0f : F16 ? 512.0f : 64.0f;
constexpr u32 UNIT_PART2 = !INTEGERS ? ONE2 : both(F16 ? 0x1800u : 0x3C80u);  // 1 / UNIT
constexpr u32 TOP = F16 ? 0x7800u : 0x7F00u;  // the largest power of two
constexpr int EXPONENT = F16 ? 10 : 7;        // where a number's exponent begins

// -zero / UNIT, and that of the zero of two's complement.
__device__ __forceinline__ u32 minus_zero(u32 zero2) {
  return fma2(zero2, both(0x8000u | TOP), MINUS_ZERO2);
}
constexpr u32 MINUS_SIGN =
    SIGN ? both(0x8000u | ((F16 ? 15 - 9 : 127 - 6) + BITS - 1) << EXPONENT) : MINUS_ZERO2;

// A minifloat's exponent and mantissa in place are the number over a power of two, subnormals too.
constexpr int UP = EXPONENT - MANTISSA;
constexpr u32 POWER = (F16 ? 31 : 255) - (1 << (KIND == MINIFLOAT ? BITS - 2 - MANTISSA : 0)) << EXPONENT;

// The pair of minifloats AT bits up in each half in place, and the sign at the top. Where there is room
// for both beside each other, one multiplication moves them.
template <int AT>
__device__ __forceinline__ u32 in_place(u32 w) {
  constexpr u32 SIZE = both(((1u << (BITS - 1)) - 1) << UP), TOPS = both(0x8000u);
  constexpr int TO_TOP = 16 - BITS - AT;
  if constexpr (UP + BITS <= 16 - BITS && AT <= UP) {
    return (w & both(((1u << BITS) - 1) << AT)) * ((1u << (UP - AT)) + (1u << TO_TOP)) & (SIZE | TOPS);
  } else {
    return (AT < UP ? w << (UP - AT & 31) : w >> (AT - UP & 31)) & SIZE | w << TO_TOP & TOPS;
  }
}

// 8 codes of which each half holds four, or where FOURS the halves of two words two each: the pairs
// (i, i + 4), or (0, 2), (1, 3), (4, 6), (5, 7).
constexpr bool FOURS = BITS > 4 && (INTEGERS || KIND == MINIFLOAT);
template <int I>
__device__ __forceinline__ u32 pair_at(uint2 halves, u32 sign, u32 minus) {
  const u32 word = FOURS && I > 1 ? halves.y : halves.x;
  constexpr int BIT = BITS * (FOURS ? I % 2 : I), BESIDE = 8 / BITS * BITS;  // bits that are read without a shift
  if constexpr (KIND == MINIFLOAT) {
    constexpr int DOWN = 2 * BITS + UP <= 16 ? BIT / BESIDE * BESIDE : 0;  // so that a multiplication will do
    return fma2(in_place<BIT - DOWN>(word >> DOWN), minus, MINUS_ZERO2);
  } else {
    constexpr int AT = BIT % BESIDE;
    const u32 w = word >> BIT / BESIDE * BESIDE;
    return fma2(SIGN ? and_xor(w, MASK << AT, sign << AT) : w & MASK << AT, both(TOP - (AT << EXPONENT)), minus);
  }
}
// `minus`: of minifloats what they are multiplied by.
__device__ __forceinline__ void numbers_of(uint2 halves, u32 sign, u32 minus, u32* a) {
  a[0] = pair_at<0>(halves, sign, minus), a[1] = pair_at<1>(halves, sign, minus);
  a[2] = pair_at<2>(halves, sign, minus), a[3] = pair_at<3>(halves, sign, minus);
}

// 8 codes at a thread's place in a group's bytes as such halves; `word`: those of 4 bits.
__device__ __forceinline__ uint2 halves_of(const u8* line, int t, u32 word) {
  if constexpr (BITS == 8) return *(const uint2*)(line + 8 * t);
  if constexpr (BITS == 4) return make_uint2(word, 0);
  if constexpr (BITS == 2) return make_uint2(__byte_perm(*(const u16*)(line + 2 * t), 0, 0x4140), 0);
  if constexpr (BITS == 1) return make_uint2(line[t] * 0x1001u, 0);
  const int byte = BITS * t, shift = 8 * (byte & 3);
  const u32* words = (const u32*)(line + (byte & ~3));
  const u32 low = __funnelshift_r(words[0], words[1], shift);
  if constexpr (BITS == 3) return make_uint2(merge(low, low << 4, 0xFFFF), 0);
  constexpr int APART = 16 - 2 * BITS & 15;
  const u32 rest = BITS == 7 ? __funnelshift_r(words[1], words[2], shift) : words[1] >> shift;
  const u32 high = __funnelshift_r(low, rest, 4 * BITS & 31);
  return make_uint2(merge(low, low << APART, 0xFFFF), merge(high, high << APART, 0xFFFF));
}

// 8 codes of any kind as pairs of numbers. `magic`: SIGN in both halves where INTEGERS; else it, `minus`
// and `zero` are those of codes.cuh.
__device__ __forceinline__ void few(const u8* line, int t, u32 word, u32 magic, u32 minus, float zero,
                                    const u32* lut, u32* a) {
  if constexpr (INTEGERS || KIND == MINIFLOAT) {
    numbers_of(halves_of(line, t, word), magic, minus, a);
  } else {
    decode(line, t, word, magic, minus, zero, lut, a);
  }
}
