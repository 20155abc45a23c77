// AVX2, FMA and F16C (Haswell, Zen 1 and later): 8 lanes.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "simd_x86.h"
#include "weight.h"

namespace pq::PQ_TARGET {

constexpr int kWidth = 8;
constexpr int kTileRows = 6;
constexpr bool kWalks = true;
using F = __m256;
using I = __m256i;

inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F v) { _mm256_storeu_ps(p, v); }
inline F set1(float v) { return _mm256_set1_ps(v); }
inline F zero() { return _mm256_setzero_ps(); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline float sum(F v) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

inline I lanes() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline I first(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes()); }
inline F keep(F v, int n) { return _mm256_and_ps(v, _mm256_castsi256_ps(first(n))); }
inline void store_part(float* p, F v, int n) { _mm256_maskstore_ps(p, first(n), v); }

inline F from_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline F from_bf16(const uint16_t* p) {
  const I wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline I bytes(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
inline F from_u8(const uint8_t* p) { return _mm256_cvtepi32_ps(bytes(p)); }
inline F from_ue8m0(const uint8_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(bytes(p), 23));
}
inline void to_f16(uint16_t* p, F v) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
// The low halves of 8 lanes, whose upper halves are zero.
inline __m128i narrow(I v) {
  return _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
}
inline void to_bf16(uint16_t* p, F v) {
  const I bits = _mm256_castps_si256(v);
  const I odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const I up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const I quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const F chosen = _mm256_blendv_ps(_mm256_castsi256_ps(up), _mm256_castsi256_ps(quiet),
                                    _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  _mm_storeu_si128((__m128i*)p, narrow(_mm256_srli_epi32(_mm256_castps_si256(chosen), 16)));
}

inline F divide(F a, F b) { return _mm256_div_ps(a, b); }
// 8 fields of `bits` bits, a byte each, side by side: joined in pairs, three times.
inline uint64_t join_fields(uint64_t eight, int bits) {
  const uint64_t even[] = {0x00ff00ff00ff00ffull, 0x0000ffff0000ffffull, 0x00000000ffffffffull};
  for (int i = 0; i < 3; ++i)
    eight = (eight & even[i]) | ((eight & ~even[i]) >> ((8 - bits) << i));
  return eight;
}
inline F magnitude(F v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline float highest(F v) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
inline float lowest(F v) {
  __m128 half = _mm_min_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_min_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_min_ss(half, _mm_movehdup_ps(half)));
}
inline F round_even(F v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline I set1_int(int v) { return _mm256_set1_epi32(v); }
inline I and_int(I a, I b) { return _mm256_and_si256(a, b); }
inline I sub_int(I a, I b) { return _mm256_sub_epi32(a, b); }
inline I add_int(I a, I b) { return _mm256_add_epi32(a, b); }
inline I or_int(I a, I b) { return _mm256_or_si256(a, b); }
inline I to_int(F v) { return _mm256_cvtps_epi32(v); }  // to nearest, ties to even
inline void store_bytes(uint8_t* p, I v) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(words, words));
}
// index + by where t lies above the edge
inline I step_above(F t, F edge, I index, int by) {
  const I above = _mm256_castps_si256(_mm256_cmp_ps(t, edge, _CMP_GT_OQ));
  return add_int(index, and_int(above, set1_int(by)));
}
// A magnitude's bits rounded to nearest even after `drop` of them, and those dropped.
inline I round_bits(F v, int drop) {
  const __m128i by = _mm_cvtsi32_si128(drop);
  const I bits = _mm256_castps_si256(v);
  const I odd = and_int(_mm256_srl_epi32(bits, by), set1_int(1));
  return _mm256_srl_epi32(add_int(bits, add_int(odd, set1_int((1 << (drop - 1)) - 1))), by);
}
// a where v < edge, else b
inline I below(F v, F edge, I a, I b) {
  return _mm256_blendv_epi8(b, a, _mm256_castps_si256(_mm256_cmp_ps(v, edge, _CMP_LT_OQ)));
}
// `bit` in the lanes of negative numbers, -0 among them
inline I where_negative(F v, I bit) {
  return and_int(_mm256_srai_epi32(_mm256_castps_si256(v), 31), bit);
}
inline F gather(const float* table, I at) { return _mm256_i32gather_ps(table, at, 4); }

// -- codes ------------------------------------------------------------------------------------

// Up to 4 bits: 8 codes lie in one 32-bit word.
struct Small {
  I shifts;
  int64_t step;
  explicit Small(int bits) : shifts(_mm256_mullo_epi32(lanes(), _mm256_set1_epi32(bits))), step(bits) {}
  I operator()(const uint8_t* p) const {
    int32_t word;
    std::memcpy(&word, p, 4);
    return _mm256_srlv_epi32(_mm256_set1_epi32(word), shifts);
  }
};

// For every width, the two bytes of a word that hold each lane's code, and where it begins there.
struct Controls {
  alignas(32) uint8_t from[9][32] = {};
  alignas(32) int32_t by[9][8] = {};
  constexpr Controls() {
    for (int bits = 1; bits <= 8; ++bits)
      for (int lane = 0; lane < 8; ++lane) {
        const int at = bits * lane;
        by[bits][lane] = at % 8;
        for (int byte = 0; byte < 4; ++byte) {
          const int wanted = at / 8 + byte;
          from[bits][4 * lane + byte] =
              static_cast<uint8_t>(byte < 2 && wanted < 8 ? wanted : 0x80);
        }
      }
  }
};
inline constexpr Controls kControls;

// 5 to 7 bits: 8 codes lie in one 64-bit word.
struct Large {
  I bytes, shifts;
  int64_t step;
  explicit Large(int bits)
      : bytes(_mm256_load_si256((const I*)kControls.from[bits])),
        shifts(_mm256_load_si256((const I*)kControls.by[bits])),
        step(bits) {}
  I operator()(const uint8_t* p) const {
    int64_t word;
    std::memcpy(&word, p, 8);
    return _mm256_srlv_epi32(_mm256_shuffle_epi8(_mm256_set1_epi64x(word), bytes), shifts);
  }
};

struct Byte {
  int64_t step = 8;
  explicit Byte(int) {}
  I operator()(const uint8_t* p) const { return bytes(p); }
};

// Bytes, sign-extended to 16 bits, for Float8.
struct Word {
  int64_t step = 8;
  __m128i operator()(const uint8_t* p) const {
    return _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
  }
};

// -- numbers ----------------------------------------------------------------------------------

struct Table16 {
  F low, high;
  explicit Table16(const float* table) : low(load(table)), high(load(table + 8)) {}
  F operator()(I codes) const {
    const F upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));  // bit 3 as the sign
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, codes),
                            _mm256_permutevar8x32_ps(high, codes), upper);
  }
};

struct Integer {
  __m128i shift;
  bool is_signed;
  Integer(int bits, bool is_signed) : shift(_mm_cvtsi32_si128(32 - bits)), is_signed(is_signed) {}
  F operator()(I codes) const {
    const I top = _mm256_sll_epi32(codes, shift);
    return _mm256_cvtepi32_ps(is_signed ? _mm256_sra_epi32(top, shift) : _mm256_srl_epi32(top, shift));
  }
};

struct Mini {
  I sign_mask, rest_mask, nan_code;
  __m128i sign_shift, rest_shift;
  F power;
  bool has_nan;
  explicit Mini(const Minifloat& m)
      : sign_mask(_mm256_set1_epi32((int)m.sign_mask)),
        rest_mask(_mm256_set1_epi32((int)m.rest_mask)),
        nan_code(_mm256_set1_epi32((int)m.nan_code)),
        sign_shift(_mm_cvtsi32_si128(m.sign_shift)),
        rest_shift(_mm_cvtsi32_si128(m.rest_shift)),
        power(set1(m.power)),
        has_nan(m.nan_code != 0) {}
  F operator()(I codes) const {
    const I rest = _mm256_and_si256(codes, rest_mask);
    const I sign = _mm256_sll_epi32(_mm256_and_si256(codes, sign_mask), sign_shift);
    const I half = _mm256_or_si256(sign, _mm256_sll_epi32(rest, rest_shift));
    const F number = mul(_mm256_cvtph_ps(narrow(half)), power);
    if (!has_nan) return number;
    const F nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    return _mm256_blendv_ps(number, nan, _mm256_castsi256_ps(_mm256_cmpeq_epi32(rest, nan_code)));
  }
};

// Minifloats of a byte: moved to float16's places in 16-bit lanes.
struct Float8 {
  static constexpr bool kFolds = true;
  struct Group {
    bool is_finite;
  };
  I nan_bytes;
  __m128i keep, nan_code, shift;
  F power;
  bool has_nan;
  explicit Float8(const Minifloat& m)
      : nan_bytes(_mm256_set1_epi8((char)m.nan_code)),
        keep(_mm_set1_epi16((short)(0x8000 | m.rest_mask << m.rest_shift))),
        nan_code(_mm_set1_epi16((short)(m.nan_code << m.rest_shift << 1))),
        shift(_mm_cvtsi32_si128(m.rest_shift)),
        power(set1(m.power)),
        has_nan(m.nan_code != 0) {}
  F operator()(__m128i codes) const { return mul(bare(codes), power); }
  // Whether none of 4 * kWidth codes stands for NaN where float16 has a number.
  Group group(const uint8_t* p) const {
    const I rest = _mm256_and_si256(_mm256_loadu_si256((const I*)p), _mm256_set1_epi8(127));
    return {!has_nan || !_mm256_movemask_epi8(_mm256_cmpeq_epi8(rest, nan_bytes))};
  }
  F of(const Group& group, const uint8_t* p, int) const {
    const __m128i codes = Word()(p);
    if (!group.is_finite) return bare(codes);
    return _mm256_cvtph_ps(_mm_and_si128(_mm_sll_epi16(codes, shift), keep));
  }
  F bare(__m128i codes) const {  // before the power of two
    __m128i half = _mm_and_si128(_mm_sll_epi16(codes, shift), keep);
    if (has_nan)
      half = _mm_or_si128(half, _mm_and_si128(_mm_cmpeq_epi16(_mm_slli_epi16(half, 1), nan_code),
                                              _mm_set1_epi16(0x7e00)));
    return _mm256_cvtph_ps(half);
  }
};

struct Table256 {
  const float* table;
  I mask;
  Table256(const float* table, int bits) : table(table), mask(_mm256_set1_epi32((1 << bits) - 1)) {}
  F operator()(I codes) const { return _mm256_i32gather_ps(table, _mm256_and_si256(codes, mask), 4); }
};

// For blocks of 1, 2, 4, ... elements, which block of a vector each lane is in.
struct Sharing {
  alignas(32) int32_t at[5][8] = {};
  constexpr Sharing() {
    for (int power = 0; power < 5; ++power)
      for (int lane = 0; lane < 8; ++lane) at[power][lane] = lane >> power;
  }
};
inline constexpr Sharing kSharing;

// The scales of the blocks that share a vector, each as often as its block is long.
struct Spread {
  I from;
  explicit Spread(int block)
      : from(_mm256_load_si256((const I*)kSharing.at[__builtin_ctz(static_cast<unsigned>(block))])) {}
  F operator()(const float* scales) const {
    return _mm256_permutevar8x32_ps(load(scales), from);
  }
};

// -- bytes for products of integers ----------------------------------------------------------

inline F zeros_as_one(F v) {
  return _mm256_or_ps(v, _mm256_and_ps(_mm256_cmp_ps(v, zero(), _CMP_EQ_OQ), set1(1.0f)));
}
inline F load_some(const float* p, int64_t count) {  // zeros beyond
  return count >= kWidth ? load(p) : _mm256_maskload_ps(p, first(static_cast<int>(count)));
}

inline I held(I v) { return v; }
inline I load_int(const int32_t* p) { return _mm256_loadu_si256((const I*)p); }
inline void store_int(int32_t* p, I v) { _mm256_storeu_si256((I*)p, v); }
inline I mul_int(I a, I b) { return _mm256_mullo_epi32(a, b); }
inline F to_float(I v) { return _mm256_cvtepi32_ps(v); }

// A step of a line's codes as unsigned bytes. Of 2, 4 and 8 bits it is 32 bytes of the line, which
// have codes for kParts vectors: part j has the j-th code of every byte. Of any other width (kBits 0)
// it is 32 codes as they follow. kPlanes: tables; one is there or not where kBits is 0.
template <int kBits, int kPlanes>
struct Bytes8 {
  static constexpr bool kIsTable = kBits && kPlanes;
  static constexpr int kTables = kPlanes ? kPlanes : 1;
  static constexpr int kParts = kBits ? 8 / kBits : 1;
  // Products of small numbers may be added up in 16 bits. Others need x as 16-bit numbers: those of
  // even bytes, then those of odd ones.
  static constexpr bool kIsSmall = kParts > 1 && !kPlanes;
  static constexpr int kPartBytes = kIsSmall ? 32 : 64;
  struct Codes {
    I at[kParts];
  };
  I mask, flip, tables[kTables]{};
  int bits;
  bool has_table;
  int64_t step;
  explicit Bytes8(const Weight8& kind)
      : mask(_mm256_set1_epi8((char)kind.mask)),
        flip(_mm256_set1_epi8((char)kind.flip)),
        bits(kind.bits),
        has_table(kPlanes && kind.table),
        step(kBits ? 32 : 4 * kind.bits) {
    for (int plane = 0; has_table && plane < kPlanes; ++plane)
      tables[plane] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)kind.table + plane));
  }
  Codes codes(I raw) const {
    Codes made;
    for (int j = 0; j < kParts; ++j)
      made.at[j] = _mm256_xor_si256(_mm256_and_si256(_mm256_srli_epi16(raw, j * (kBits & 7)), mask), flip);
    return made;
  }
  Codes operator()(const uint8_t* p) const {
    return kBits || bits == 8 ? codes(_mm256_loadu_si256((const I*)p)) : part(p, step);
  }
  Codes part(const uint8_t* p, int64_t left) const {
    alignas(32) uint8_t some[40] = {}, fields[32];
    std::memcpy(some, p, static_cast<size_t>(left < 0 ? 0 : left < step ? left : step));
    if (kBits || bits == 8) return codes(_mm256_load_si256((const I*)some));
    for (int i = 0; i < 32; ++i) {
      uint16_t word;
      std::memcpy(&word, some + i * bits / 8, 2);
      fields[i] = static_cast<uint8_t>(word >> i * bits % 8);
    }
    return codes(_mm256_load_si256((const I*)fields));
  }
  Codes mapped(Codes codes, int plane) const {
    if (!kPlanes || !(kBits || has_table)) return codes;
    for (I& part : codes.at) part = _mm256_shuffle_epi8(tables[plane], part);
    return codes;
  }
  static Codes ones() {
    Codes made;
    for (I& part : made.at) part = _mm256_set1_epi8(1);
    return made;
  }
  static void put(const int8_t* codes, uint8_t* to) {
    if (kIsSmall) {
      std::memcpy(to, codes, 32);
      return;
    }
    for (int i = 0; i < 32; ++i) {
      const int16_t code = codes[i];
      std::memcpy(to + i % 2 * 32 + i / 2 * 2, &code, 2);
    }
  }
  static const uint8_t* row(const uint8_t* x) { return x; }
  // start + the products of bytes and x, of four bytes in every lane
  static I dot(I start, const Codes& bytes, const uint8_t* x) {
    if (kIsSmall) {
      I total = _mm256_setzero_si256();
      for (int j = 0; j < kParts; ++j)
        total = _mm256_add_epi16(
            total, _mm256_maddubs_epi16(bytes.at[j], _mm256_loadu_si256((const I*)(x + 32 * j))));
      return _mm256_add_epi32(start, _mm256_madd_epi16(total, _mm256_set1_epi16(1)));
    }
    for (int j = 0; j < kParts; ++j) {
      const I even = _mm256_and_si256(bytes.at[j], _mm256_set1_epi16(255));
      const I odd = _mm256_srli_epi16(bytes.at[j], 8);
      const I first = _mm256_madd_epi16(even, _mm256_loadu_si256((const I*)(x + 64 * j)));
      const I second = _mm256_madd_epi16(odd, _mm256_loadu_si256((const I*)(x + 64 * j + 32)));
      start = _mm256_add_epi32(start, _mm256_add_epi32(first, second));
    }
    return start;
  }
};

// The scales of the units of a step, each in kLanes lanes.
template <int kLanes>
inline F lane_scales(const float* scales) {
  return kLanes == kWidth ? set1(*scales) : Spread(kLanes)(scales);
}

}  // namespace pq::PQ_TARGET
