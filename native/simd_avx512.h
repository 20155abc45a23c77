// AVX-512 with VBMI (Ice Lake, Zen 4 and later): 16 lanes, fields of any width by one multishift.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "simd_x86.h"
#include "weight.h"

namespace pq::PQ_TARGET {

constexpr int kWidth = 16;
constexpr int kTileRows = 12;  // accumulators of a product tile: kTileRows x 2 vectors
constexpr bool kWalks = true;  // common decoders have loops of their own
using F = __m512;
using I = __m512i;

inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F v) { _mm512_storeu_ps(p, v); }
inline F set1(float v) { return _mm512_set1_ps(v); }
inline F zero() { return _mm512_setzero_ps(); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(F v) { return _mm512_reduce_add_ps(v); }

inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
inline F keep(F v, int n) { return _mm512_maskz_mov_ps(first(n), v); }
inline void store_part(float* p, F v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }

inline F from_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline F from_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline F from_u8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline F from_ue8m0(const uint8_t* p) {
  const I bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bytes, 23));
}
inline void to_f16(uint16_t* p, F v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
inline void to_bf16(uint16_t* p, F v) {
  const I bits = _mm512_castps_si512(v);
  const I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  I up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  up = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16)));
}

inline F divide(F a, F b) { return _mm512_div_ps(a, b); }
// 8 fields of `bits` bits, a byte each, side by side.
inline uint64_t join_fields(uint64_t eight, int bits) {
  return _pext_u64(eight, 0x0101010101010101ull * ((1u << bits) - 1));
}
inline F magnitude(F v) { return _mm512_abs_ps(v); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline float highest(F v) { return _mm512_reduce_max_ps(v); }
inline float lowest(F v) { return _mm512_reduce_min_ps(v); }
inline F round_even(F v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT); }
inline I set1_int(int v) { return _mm512_set1_epi32(v); }
inline I and_int(I a, I b) { return _mm512_and_si512(a, b); }
inline I to_int(F v) { return _mm512_cvtps_epi32(v); }  // to nearest, ties to even
inline void store_bytes(uint8_t* p, I v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(v)); }
// index + by where t lies above the edge
inline I step_above(F t, F edge, I index, int by) {
  const __mmask16 above = _mm512_cmp_ps_mask(t, edge, _CMP_GT_OQ);
  return _mm512_mask_add_epi32(index, above, index, set1_int(by));
}
// A magnitude's bits rounded to nearest even after `drop` of them, and those dropped.
inline I round_bits(F v, int drop) {
  const __m128i by = _mm_cvtsi32_si128(drop);
  const I bits = _mm512_castps_si512(v);
  const I odd = _mm512_and_si512(_mm512_srl_epi32(bits, by), set1_int(1));
  const I up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, set1_int((1 << (drop - 1)) - 1)));
  return _mm512_srl_epi32(up, by);
}
inline I sub_int(I a, I b) { return _mm512_sub_epi32(a, b); }
inline I add_int(I a, I b) { return _mm512_add_epi32(a, b); }
inline I or_int(I a, I b) { return _mm512_or_si512(a, b); }
// a where v < edge, else b
inline I below(F v, F edge, I a, I b) {
  return _mm512_mask_mov_epi32(b, _mm512_cmp_ps_mask(v, edge, _CMP_LT_OQ), a);
}
// `bit` in the lanes of negative numbers, -0 among them
inline I where_negative(F v, I bit) {
  return _mm512_maskz_mov_epi32(_mm512_movepi32_mask(_mm512_castps_si512(v)), bit);
}
inline F gather(const float* table, I at) { return _mm512_i32gather_ps(at, table, 4); }

// -- codes: kWidth of them in natural order, one a lane; bits above the field are anything --------

struct WordBytes {  // for every width, which bytes each 64-bit word needs
  alignas(64) uint8_t at[9][64] = {};
  constexpr WordBytes() {
    for (int bits = 1; bits <= 8; ++bits)
      for (int i = 0; i < 64; ++i) at[bits][i] = static_cast<uint8_t>(i / 8 * bits + i % 8);
  }
};
struct FieldStarts {  // for every width, where the 8 fields of a word begin
  alignas(64) uint8_t at[9][64] = {};
  constexpr FieldStarts() {
    for (int bits = 1; bits <= 8; ++bits)
      for (int i = 0; i < 64; ++i) at[bits][i] = static_cast<uint8_t>(i % 8 * bits);
  }
};
inline constexpr WordBytes kWordBytes;
inline constexpr FieldStarts kFieldStarts;

// Where the fields of a word begin, in bits, for every width: one byte of each 32-bit lane.
struct Controls {
  alignas(64) uint8_t at[9][64] = {};
  constexpr Controls() {
    for (int bits = 1; bits <= 8; ++bits)
      for (int lane = 0; lane < 16; ++lane) at[bits][4 * lane] = static_cast<uint8_t>(bits * lane % 64);
  }
};
inline constexpr Controls kInOneWord;

// Up to 4 bits: 16 codes lie in one 64-bit word.
struct Small {
  I control;
  int64_t step;  // bytes of kWidth codes
  explicit Small(int bits) : control(_mm512_load_si512(kInOneWord.at[bits])), step(2 * bits) {}
  I operator()(const uint8_t* p) const {
    uint64_t word;
    std::memcpy(&word, p, 8);
    return _mm512_multishift_epi64_epi8(control, _mm512_set1_epi64((long long)word));
  }
};

// For wider codes, the bytes of 16 that the two lanes of each word need, and where the fields begin there.
struct Pairs {
  alignas(64) uint8_t from[9][64] = {}, at[9][64] = {};
  constexpr Pairs() {
    for (int bits = 1; bits <= 8; ++bits)
      for (int i = 0; i < 64; ++i) {
        const int word = i / 8, first = 2 * word * bits, lane = i % 8 / 4;
        const int byte = first / 8 + i % 8, start = first % 8 + lane * bits;
        from[bits][i] = static_cast<uint8_t>(byte < 16 ? byte : 0x80);
        at[bits][i] = static_cast<uint8_t>(start);
      }
  }
};
inline constexpr Pairs kPairs;

// 5 to 7 bits: 16 codes lie in 16 bytes.
struct Large {
  I bytes, control;
  int64_t step;
  explicit Large(int bits)
      : bytes(_mm512_load_si512(kPairs.from[bits])),
        control(_mm512_load_si512(kPairs.at[bits])),
        step(2 * bits) {}
  I operator()(const uint8_t* p) const {
    const I all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p));
    return _mm512_multishift_epi64_epi8(control, _mm512_shuffle_epi8(all, bytes));
  }
};

struct Byte {
  int64_t step = 16;
  explicit Byte(int) {}
  I operator()(const uint8_t* p) const {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  }
};

// Bytes, sign-extended to 16 bits, for Float8.
struct Word {
  int64_t step = 16;
  __m256i operator()(const uint8_t* p) const {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
  }
};

// -- numbers ----------------------------------------------------------------------------------

struct Table16 {
  F entries;
  explicit Table16(const float* table) : entries(load(table)) {}
  F operator()(I codes) const { return _mm512_permutexvar_ps(codes, entries); }
};

// A code, its sign bit turned, as the last bits of 2^23 + code: what is then subtracted is exact.
struct Integer {
  I mask, flip;
  F zero;
  Integer(int bits, bool is_signed)
      : mask(_mm512_set1_epi32((1 << bits) - 1)),
        flip(_mm512_set1_epi32(0x4b000000 | (is_signed ? 1 << (bits - 1) : 0))),
        zero(_mm512_castsi512_ps(flip)) {}
  F operator()(I codes) const {  // (code & mask) ^ flip
    return sub(_mm512_castsi512_ps(_mm512_ternarylogic_epi64(codes, mask, flip, 0x6a)), zero);
  }
};

struct Mini {
  I sign_mask, rest_mask, nan_code;
  __m128i sign_shift, rest_shift;
  F power;
  bool has_nan;
  explicit Mini(const Minifloat& m)
      : sign_mask(_mm512_set1_epi32((int)m.sign_mask)),
        rest_mask(_mm512_set1_epi32((int)m.rest_mask)),
        nan_code(_mm512_set1_epi32((int)m.nan_code)),
        sign_shift(_mm_cvtsi32_si128(m.sign_shift)),
        rest_shift(_mm_cvtsi32_si128(m.rest_shift)),
        power(set1(m.power)),
        has_nan(m.nan_code != 0) {}
  F operator()(I codes) const {
    const I rest = _mm512_and_si512(codes, rest_mask);
    const I sign = _mm512_sll_epi32(_mm512_and_si512(codes, sign_mask), sign_shift);
    const I half = _mm512_or_si512(sign, _mm512_sll_epi32(rest, rest_shift));
    const F number = mul(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(half)), power);
    if (!has_nan) return number;
    return _mm512_mask_mov_ps(number, _mm512_cmpeq_epi32_mask(rest, nan_code),
                              _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
  }
};

// The two bytes of numbers as bfloat16, which holds them all: of every code of 5 or 6 bits (again where
// another bit is set), and of the magnitudes of 8-bit minifloats by the bits of the mantissa, NaN too.
constexpr uint16_t bfloat16_of(int sign, int exponent, int fraction, int fraction_bits) {
  while (exponent > -127 && fraction && fraction < 1 << fraction_bits) fraction *= 2, --exponent;
  if (!fraction) return static_cast<uint16_t>(sign << 15);
  while (fraction >= 2 << fraction_bits) ++exponent, ++fraction_bits;
  const int rest = fraction - (1 << fraction_bits);
  const int places = fraction_bits <= 7 ? rest << (7 - fraction_bits) : rest >> (fraction_bits - 7);
  return static_cast<uint16_t>(sign << 15 | (exponent + 127) << 7 | places);
}
constexpr uint16_t of_integer(int number) {
  return number < 0 ? bfloat16_of(1, 0, -number, 0) : bfloat16_of(0, 0, number, 0);
}
constexpr uint16_t of_minifloat(int magnitude, int mantissa_bits, int bias, int sign) {
  const int one = 1 << mantissa_bits, exponent = magnitude >> mantissa_bits, rest = magnitude % one;
  return bfloat16_of(sign, (exponent ? exponent : 1) - bias, exponent ? one + rest : rest, mantissa_bits);
}
template <int kCodes>
struct BFloats {
  alignas(64) uint8_t low[kCodes] = {}, high[kCodes] = {};
  constexpr void put(int code, uint16_t bits) {
    low[code] = static_cast<uint8_t>(bits);
    high[code] = static_cast<uint8_t>(bits >> 8);
  }
};
struct SmallNumbers {
  BFloats<64> integers[2][2], minifloats[2];  // of 5 and 6 bits, without and with a sign; e3m2 and e2m3
  BFloats<128> magnitudes[2];                 // of e5m2 and e4m3
  constexpr SmallNumbers() {
    for (int code = 0; code < 64; ++code) {
      for (int bits = 5; bits <= 6; ++bits) {
        const int unsigned_code = code % (1 << bits), half = 1 << (bits - 1);
        integers[bits - 5][0].put(code, of_integer(unsigned_code));
        integers[bits - 5][1].put(code, of_integer((unsigned_code ^ half) - half));
      }
      minifloats[0].put(code, of_minifloat(code % 32, 2, 3, code / 32));
      minifloats[1].put(code, of_minifloat(code % 32, 3, 1, code / 32));
    }
    for (int code = 0; code < 128; ++code) {
      const uint16_t special = code == 124 ? 0x7f80 : 0x7fc0;
      magnitudes[0].put(code, code >= 124 ? special : of_minifloat(code, 2, 15, 0));
      magnitudes[1].put(code, code == 127 ? special : of_minifloat(code, 3, 7, 0));
    }
  }
};
inline constexpr SmallNumbers kSmallNumbers;
inline int is_of_three(const Minifloat& m) { return m.rest_shift == 7; }  // bits of the mantissa

// In each lane of a vector of 4, where its number's two bytes are among 64 low and 64 high ones.
struct Places {
  alignas(64) uint8_t at[4][64] = {};
  constexpr Places() {
    for (int j = 0; j < 4; ++j)
      for (int i = 0; i < 64; ++i) at[j][i] = static_cast<uint8_t>((i % 4 == 3 ? 64 : 0) + 16 * j + i / 4);
  }
};
inline constexpr Places kPlaces;

// The same number, in a register: GCC would read what is used twice from memory again.
inline I held(I v) {
  asm("" : "+v"(v));
  return v;
}
struct ByBytes {  // 64 numbers as bfloat16
  static constexpr bool kFolds = false;
  struct Group {
    I low, high;
  };
  I places[4];
  ByBytes() {
    for (int j = 0; j < 4; ++j) places[j] = held(_mm512_load_si512(kPlaces.at[j]));
  }
  F of(const Group& group, const uint8_t*, int j) const {
    return _mm512_castsi512_ps(
        _mm512_maskz_permutex2var_epi8(0xccccccccccccccccull, group.low, places[j], group.high));
  }
};

// Codes of 5 or 6 bits, of Large.
struct Looked : ByBytes {
  I words, starts, low, high;
  Looked(int bits, const BFloats<64>& numbers)
      : words(_mm512_load_si512(kWordBytes.at[bits])),
        starts(_mm512_load_si512(kFieldStarts.at[bits])),
        low(_mm512_load_si512(numbers.low)),
        high(_mm512_load_si512(numbers.high)) {}
  static Looked of_integers(int bits, bool is_signed) {
    return Looked(bits, kSmallNumbers.integers[bits - 5][is_signed]);
  }
  static Looked of_minifloats(const Minifloat& m) {
    return Looked(6, kSmallNumbers.minifloats[is_of_three(m)]);
  }
  Group group(const uint8_t* p) const {
    const I bytes = _mm512_permutexvar_epi8(words, _mm512_loadu_si512(p));
    const I codes = _mm512_multishift_epi64_epi8(starts, bytes);
    return {_mm512_permutexvar_epi8(codes, low), _mm512_permutexvar_epi8(codes, high)};
  }
  F operator()(I codes) const {
    const I first = _mm512_slli_epi32(_mm512_permutexvar_epi8(codes, high), 24);
    const I second = _mm512_srli_epi32(_mm512_slli_epi32(_mm512_permutexvar_epi8(codes, low), 24), 8);
    return _mm512_castsi512_ps(_mm512_or_si512(first, second));
  }
};

// Minifloats of a byte: one of them moved to float16's places in 16-bit lanes, 64 looked up.
struct Float8 : ByBytes {
  I low[2], high[2];
  __m256i keep, nan_code;
  __m128i shift;
  F power;
  bool has_nan;
  explicit Float8(const Minifloat& m)
      : keep(_mm256_set1_epi16((short)(0x8000 | m.rest_mask << m.rest_shift))),
        nan_code(_mm256_set1_epi16((short)(m.nan_code << m.rest_shift))),
        shift(_mm_cvtsi32_si128(m.rest_shift)),
        power(set1(m.power)),
        has_nan(m.nan_code != 0) {
    const BFloats<128>& numbers = kSmallNumbers.magnitudes[is_of_three(m)];
    for (int half = 0; half < 2; ++half) {
      low[half] = _mm512_load_si512(numbers.low + 64 * half);
      high[half] = _mm512_load_si512(numbers.high + 64 * half);
    }
  }
  F operator()(__m256i codes) const {
    __m256i half = _mm256_and_si256(_mm256_sll_epi16(codes, shift), keep);
    if (has_nan) {
      const __mmask16 nan = _mm256_cmpeq_epi16_mask(_mm256_slli_epi16(half, 1), _mm256_slli_epi16(nan_code, 1));
      half = _mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7e00));
    }
    return mul(_mm512_cvtph_ps(half), power);
  }
  Group group(const uint8_t* p) const {
    const I codes = _mm512_loadu_si512(p), sign = _mm512_set1_epi8((char)0x80);
    const I top = _mm512_permutex2var_epi8(high[0], codes, high[1]);
    return {_mm512_permutex2var_epi8(low[0], codes, low[1]),
            _mm512_ternarylogic_epi64(top, codes, sign, 0xf8)};  // top | (codes & sign)
  }
};

struct Table256 {
  const float* table;
  I mask;
  Table256(const float* table, int bits) : table(table), mask(_mm512_set1_epi32((1 << bits) - 1)) {}
  F operator()(I codes) const {
    return _mm512_i32gather_ps(_mm512_and_si512(codes, mask), table, 4);
  }
};

// For blocks of 1, 2, 4, ... elements, which block of a vector each lane is in.
struct Sharing {
  alignas(64) int32_t at[5][16] = {};
  constexpr Sharing() {
    for (int power = 0; power < 5; ++power)
      for (int lane = 0; lane < 16; ++lane) at[power][lane] = lane >> power;
  }
};
inline constexpr Sharing kSharing;

// The scales of the blocks that share a vector, each as often as its block is long.
struct Spread {
  I lanes;
  explicit Spread(int block)
      : lanes(_mm512_load_si512(kSharing.at[__builtin_ctz(static_cast<unsigned>(block))])) {}
  F operator()(const float* scales) const { return _mm512_permutexvar_ps(lanes, load(scales)); }
};

// -- bytes for products of integers ----------------------------------------------------------

inline F zeros_as_one(F v) {
  return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(v, zero(), _CMP_EQ_OQ), set1(1.0f));
}
inline F load_some(const float* p, int64_t count) {  // zeros beyond
  return count >= kWidth ? load(p) : _mm512_maskz_loadu_ps(first(static_cast<int>(count)), p);
}

inline I load_int(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void store_int(int32_t* p, I v) { _mm512_storeu_si512(p, v); }
inline I mul_int(I a, I b) { return _mm512_mullo_epi32(a, b); }
inline F to_float(I v) { return _mm512_cvtepi32_ps(v); }

// A step of a line's codes as unsigned bytes. Of 2, 4 and 8 bits it is 64 bytes of the line, which
// have codes for kParts vectors: part j has the j-th code of every byte. Of any other width (kBits 0)
// it is 64 codes as they follow. kPlanes: tables; one is there or not where kBits is 0.
template <int kBits, int kPlanes>
struct Bytes8 {
  static constexpr bool kIsTable = kBits && kPlanes;
  static constexpr int kTables = kPlanes ? kPlanes : 1;
  static constexpr int kParts = kBits ? 8 / kBits : 1, kPartBytes = 64;
  struct Codes {
    I at[kParts];
  };
  I words{}, starts{}, mask, flip, tables[kTables]{};
  bool has_table;
  int64_t step;
  explicit Bytes8(const Weight8& kind)
      : mask(_mm512_set1_epi8((char)kind.mask)),
        flip(_mm512_set1_epi8((char)kind.flip)),
        has_table(kPlanes && kind.table),
        step(kBits ? 64 : 8 * kind.bits) {
    if (!kBits) {
      words = _mm512_load_si512(kWordBytes.at[kind.bits]);
      starts = _mm512_load_si512(kFieldStarts.at[kind.bits]);
    }
    for (int plane = 0; has_table && plane < kPlanes; ++plane)
      tables[plane] =
          _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)kind.table + plane));
  }
  Codes codes(I raw) const {
    Codes made;
    if (!kBits && step < 64)
      raw = _mm512_multishift_epi64_epi8(starts, _mm512_permutexvar_epi8(words, raw));
#pragma GCC unroll 4
    for (int j = 0; j < kParts; ++j)  // (field & mask) ^ flip
      made.at[j] =
          _mm512_ternarylogic_epi64(_mm512_srli_epi32(raw, j * (kBits & 7)), mask, flip, 0x6a);
    return made;
  }
  Codes operator()(const uint8_t* p) const {
    return codes(kBits ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8(~0ull >> (64 - step), p));
  }
  Codes part(const uint8_t* p, int64_t left) const {
    const int64_t bytes = left < 0 ? 0 : left < step ? left : step;
    return codes(_mm512_maskz_loadu_epi8(_bzhi_u64(~0ull, (unsigned)bytes), p));
  }
  Codes mapped(Codes codes, int plane) const {
    if (!kPlanes || !(kBits || has_table)) return codes;
#pragma GCC unroll 4
    for (I& part : codes.at) part = _mm512_shuffle_epi8(tables[plane], part);
    return codes;
  }
  static Codes ones() {
    Codes made;
    for (I& part : made.at) part = _mm512_set1_epi8(1);
    return made;
  }
  static void put(const int8_t* codes, uint8_t* to) { std::memcpy(to, codes, 64); }
  // start + the products of bytes and x, of four bytes in every lane
  static I dot(I start, const Codes& bytes, const Codes& x) {
#pragma GCC unroll 4
    for (int j = 0; j < kParts; ++j) start = _mm512_dpbusd_epi32(start, bytes.at[j], x.at[j]);
    return start;
  }
  static Codes row(const uint8_t* x) {
    Codes made;
#pragma GCC unroll 4
    for (int j = 0; j < kParts; ++j) made.at[j] = held(_mm512_loadu_si512(x + 64 * j));
    return made;
  }
};

// The scales of the units of a step, each in kLanes lanes.
template <int kLanes>
inline F lane_scales(const float* scales) {
  if (kLanes == 1) return load(scales);
  const I lanes = _mm512_load_si512(kSharing.at[__builtin_ctz(kLanes)]);
  const F some = kLanes == 8   ? _mm512_castpd_ps(_mm512_set1_pd(*(const double*)scales))
                 : kLanes == 4 ? _mm512_broadcast_f32x4(_mm_loadu_ps(scales))
                               : _mm512_castps256_ps512(_mm256_loadu_ps(scales));
  return _mm512_permutexvar_ps(lanes, some);
}

}  // namespace pq::PQ_TARGET
