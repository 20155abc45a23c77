// NEON of 64-bit ARM: 8 lanes as two vectors of 4. With PQ_DOTPROD also ARMv8.2's dot product.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "weight.h"

namespace pq::PQ_TARGET {

constexpr int kWidth = 8;
constexpr int kTileRows = 6;
constexpr bool kWalks = true;

struct F {
  float32x4_t a, b;
};
struct I {
  uint32x4_t a, b;
};

inline I bits_of(F v) { return {vreinterpretq_u32_f32(v.a), vreinterpretq_u32_f32(v.b)}; }
inline F float_of(I v) { return {vreinterpretq_f32_u32(v.a), vreinterpretq_f32_u32(v.b)}; }

inline F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline void store(float* p, F v) {
  vst1q_f32(p, v.a);
  vst1q_f32(p + 4, v.b);
}
inline F set1(float v) { return {vdupq_n_f32(v), vdupq_n_f32(v)}; }
inline F zero() { return set1(0.0f); }
inline F add(F x, F y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
inline F sub(F x, F y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
inline F mul(F x, F y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
inline F divide(F x, F y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)}; }
inline float sum(F v) { return vaddvq_f32(vaddq_f32(v.a, v.b)); }

inline I set1_int(int v) {
  const uint32x4_t all = vdupq_n_u32(static_cast<uint32_t>(v));
  return {all, all};
}
inline I load_int(const int32_t* p) {
  return {vreinterpretq_u32_s32(vld1q_s32(p)), vreinterpretq_u32_s32(vld1q_s32(p + 4))};
}
inline I lanes() {
  const int32_t at[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  return load_int(at);
}
inline I and_int(I x, I y) { return {vandq_u32(x.a, y.a), vandq_u32(x.b, y.b)}; }
inline I or_int(I x, I y) { return {vorrq_u32(x.a, y.a), vorrq_u32(x.b, y.b)}; }
inline I add_int(I x, I y) { return {vaddq_u32(x.a, y.a), vaddq_u32(x.b, y.b)}; }
inline I sub_int(I x, I y) { return {vsubq_u32(x.a, y.a), vsubq_u32(x.b, y.b)}; }
inline void store_int(int32_t* p, I v) {
  vst1q_s32(p, vreinterpretq_s32_u32(v.a));
  vst1q_s32(p + 4, vreinterpretq_s32_u32(v.b));
}
inline I mul_int(I x, I y) { return {vmulq_u32(x.a, y.a), vmulq_u32(x.b, y.b)}; }
// Lane by lane to the left, or by a negative number to the right.
inline I shifted(I v, I by) {
  return {vshlq_u32(v.a, vreinterpretq_s32_u32(by.a)), vshlq_u32(v.b, vreinterpretq_s32_u32(by.b))};
}
inline I shifted(I v, int by) { return shifted(v, set1_int(by)); }
inline I where(I mask, I x, I y) { return {vbslq_u32(mask.a, x.a, y.a), vbslq_u32(mask.b, x.b, y.b)}; }
inline F to_float(I v) {
  return {vcvtq_f32_s32(vreinterpretq_s32_u32(v.a)), vcvtq_f32_s32(vreinterpretq_s32_u32(v.b))};
}

inline I first(int n) {
  const I all = set1_int(n), at = lanes();
  return {vcltq_u32(at.a, all.a), vcltq_u32(at.b, all.b)};
}
inline F keep(F v, int n) { return float_of(and_int(bits_of(v), first(n))); }

inline F from_halves(uint16x8_t v) {
  const float16x8_t halves = vreinterpretq_f16_u16(v);
  return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_f32_f16(vget_high_f16(halves))};
}
inline F from_f16(const uint16_t* p) { return from_halves(vld1q_u16(p)); }
inline F from_bf16(const uint16_t* p) {
  const uint16x8_t v = vld1q_u16(p);
  return float_of({vshll_n_u16(vget_low_u16(v), 16), vshll_n_u16(vget_high_u16(v), 16)});
}
inline I bytes(const uint8_t* p) {
  const uint16x8_t wide = vmovl_u8(vld1_u8(p));
  return {vmovl_u16(vget_low_u16(wide)), vmovl_u16(vget_high_u16(wide))};
}
inline F from_u8(const uint8_t* p) { return to_float(bytes(p)); }
inline F from_ue8m0(const uint8_t* p) { return float_of(shifted(bytes(p), 23)); }
inline void to_f16(uint16_t* p, F v) {
  vst1q_u16(p, vreinterpretq_u16_f16(vcombine_f16(vcvt_f16_f32(v.a), vcvt_f16_f32(v.b))));
}
// The low halves of 8 lanes.
inline uint16x8_t narrow(I v) { return vcombine_u16(vmovn_u32(v.a), vmovn_u32(v.b)); }
inline void to_bf16(uint16_t* p, F v) {
  const I bits = bits_of(v), odd = and_int(shifted(bits, -16), set1_int(1));
  const I up = add_int(bits, add_int(odd, set1_int(0x7fff)));
  const I is_number{vceqq_f32(v.a, v.a), vceqq_f32(v.b, v.b)};
  vst1q_u16(p, narrow(shifted(where(is_number, up, or_int(bits, set1_int(0x400000))), -16)));
}

// 8 fields of `bits` bits, a byte each, side by side: joined in pairs, three times.
inline uint64_t join_fields(uint64_t eight, int bits) {
  const uint64_t even[] = {0x00ff00ff00ff00ffull, 0x0000ffff0000ffffull, 0x00000000ffffffffull};
  for (int i = 0; i < 3; ++i)
    eight = (eight & even[i]) | ((eight & ~even[i]) >> ((8 - bits) << i));
  return eight;
}
inline F magnitude(F v) { return {vabsq_f32(v.a), vabsq_f32(v.b)}; }
// Of a number and NaN the number.
inline F max(F x, F y) { return {vmaxnmq_f32(x.a, y.a), vmaxnmq_f32(x.b, y.b)}; }
inline F min(F x, F y) { return {vminnmq_f32(x.a, y.a), vminnmq_f32(x.b, y.b)}; }
inline float highest(F v) { return vmaxnmvq_f32(vmaxnmq_f32(v.a, v.b)); }
inline float lowest(F v) { return vminnmvq_f32(vminnmq_f32(v.a, v.b)); }
inline F round_even(F v) { return {vrndnq_f32(v.a), vrndnq_f32(v.b)}; }
inline I to_int(F v) {  // to nearest, ties to even
  return {vreinterpretq_u32_s32(vcvtnq_s32_f32(v.a)), vreinterpretq_u32_s32(vcvtnq_s32_f32(v.b))};
}
inline void store_bytes(uint8_t* p, I v) { vst1_u8(p, vmovn_u16(narrow(v))); }
// index + by where t lies above the edge
inline I step_above(F t, F edge, I index, int by) {
  const I above{vcgtq_f32(t.a, edge.a), vcgtq_f32(t.b, edge.b)};
  return add_int(index, and_int(above, set1_int(by)));
}
// A magnitude's bits rounded to nearest even after `drop` of them, and those dropped.
inline I round_bits(F v, int drop) {
  const I bits = bits_of(v), odd = and_int(shifted(bits, -drop), set1_int(1));
  return shifted(add_int(bits, add_int(odd, set1_int((1 << (drop - 1)) - 1))), -drop);
}
// x where v < edge, else y
inline I below(F v, F edge, I x, I y) {
  return where({vcltq_f32(v.a, edge.a), vcltq_f32(v.b, edge.b)}, x, y);
}
// `bit` in the lanes of negative numbers, -0 among them
inline I where_negative(F v, I bit) {
  const I bits = bits_of(v);
  return and_int({vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(bits.a), 31)),
                  vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(bits.b), 31))}, bit);
}
inline F gather(const float* table, I at) {
  uint32_t index[8];
  float found[8];
  vst1q_u32(index, at.a);
  vst1q_u32(index + 4, at.b);
  for (int i = 0; i < 8; ++i) found[i] = table[index[i]];
  return load(found);
}

// -- codes ------------------------------------------------------------------------------------

// Up to 4 bits: 8 codes lie in one 32-bit word.
struct Small {
  I shifts;
  int64_t step;
  explicit Small(int bits) : shifts(mul_int(lanes(), set1_int(-bits))), step(bits) {}
  I operator()(const uint8_t* p) const {
    int32_t word;
    std::memcpy(&word, p, 4);
    return shifted(set1_int(word), shifts);
  }
};

// 5 to 7 bits: 8 codes lie in one 64-bit word. A lane takes the two bytes that hold its code.
struct Large {
  uint8x16_t low, high;
  I shifts;
  int64_t step;
  explicit Large(int bits) : step(bits) {
    uint8_t from[32];
    int32_t by[8];
    for (int lane = 0; lane < 8; ++lane) {
      const int at = bits * lane;
      by[lane] = -(at % 8);
      for (int byte = 0; byte < 4; ++byte)
        from[4 * lane + byte] = byte < 2 && at / 8 + byte < 8 ? static_cast<uint8_t>(at / 8 + byte) : 0xff;
    }
    low = vld1q_u8(from);
    high = vld1q_u8(from + 16);
    shifts = load_int(by);
  }
  I operator()(const uint8_t* p) const {
    const uint8x8_t half = vld1_u8(p);
    const uint8x16_t word = vcombine_u8(half, half);
    const I pairs{vreinterpretq_u32_u8(vqtbl1q_u8(word, low)), vreinterpretq_u32_u8(vqtbl1q_u8(word, high))};
    return shifted(pairs, shifts);
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
  uint16x8_t operator()(const uint8_t* p) const {
    return vreinterpretq_u16_s16(vmovl_s8(vreinterpret_s8_u8(vld1_u8(p))));
  }
};

// -- numbers ----------------------------------------------------------------------------------

struct Table16 {
  uint8x16x4_t entries;  // 64 bytes
  explicit Table16(const float* table) {
    for (int i = 0; i < 4; ++i) entries.val[i] = vreinterpretq_u8_f32(vld1q_f32(table + 4 * i));
  }
  float32x4_t at(uint32x4_t codes) const {
    const uint32x4_t first = vshlq_n_u32(vandq_u32(codes, vdupq_n_u32(15)), 2);
    const uint32x4_t places = vmlaq_n_u32(vdupq_n_u32(0x03020100u), first, 0x01010101u);
    return vreinterpretq_f32_u8(vqtbl4q_u8(entries, vreinterpretq_u8_u32(places)));
  }
  F operator()(I codes) const { return {at(codes.a), at(codes.b)}; }
};

struct Integer {
  int shift;
  bool is_signed;
  Integer(int bits, bool is_signed) : shift(32 - bits), is_signed(is_signed) {}
  F operator()(I codes) const {
    const I top = shifted(codes, shift);
    if (!is_signed) return to_float(shifted(top, -shift));
    const int32x4_t back = vdupq_n_s32(-shift);
    return {vcvtq_f32_s32(vshlq_s32(vreinterpretq_s32_u32(top.a), back)),
            vcvtq_f32_s32(vshlq_s32(vreinterpretq_s32_u32(top.b), back))};
  }
};

struct Mini {
  Minifloat m;
  explicit Mini(const Minifloat& m) : m(m) {}
  F operator()(I codes) const {
    const I rest = and_int(codes, set1_int(static_cast<int>(m.rest_mask)));
    const I sign = shifted(and_int(codes, set1_int(static_cast<int>(m.sign_mask))), m.sign_shift);
    const F number = mul(from_halves(narrow(or_int(sign, shifted(rest, m.rest_shift)))), set1(m.power));
    if (!m.nan_code) return number;
    const I nan = set1_int(static_cast<int>(m.nan_code));
    const I is_nan{vceqq_u32(rest.a, nan.a), vceqq_u32(rest.b, nan.b)};
    return float_of(where(is_nan, set1_int(0x7fc00000), bits_of(number)));
  }
};

// Minifloats of a byte: moved to float16's places in 16-bit lanes.
struct Float8 {
  static constexpr bool kFolds = true;
  struct Group {
    bool is_finite;
  };
  uint8x16_t nan_bytes;
  uint16x8_t keep, nan_code;
  int16x8_t shift;
  F power;
  bool has_nan;
  explicit Float8(const Minifloat& m)
      : nan_bytes(vdupq_n_u8(static_cast<uint8_t>(m.nan_code))),
        keep(vdupq_n_u16(static_cast<uint16_t>(0x8000 | m.rest_mask << m.rest_shift))),
        nan_code(vdupq_n_u16(static_cast<uint16_t>(m.nan_code << m.rest_shift << 1))),
        shift(vdupq_n_s16(static_cast<int16_t>(m.rest_shift))),
        power(set1(m.power)),
        has_nan(m.nan_code != 0) {}
  F operator()(uint16x8_t codes) const { return mul(bare(codes), power); }
  // Whether none of 4 * kWidth codes stands for NaN where float16 has a number.
  Group group(const uint8_t* p) const {
    const uint8x16_t rest = vdupq_n_u8(127);
    const uint8x16_t low = vceqq_u8(vandq_u8(vld1q_u8(p), rest), nan_bytes);
    const uint8x16_t high = vceqq_u8(vandq_u8(vld1q_u8(p + 16), rest), nan_bytes);
    return {!has_nan || !vmaxvq_u8(vorrq_u8(low, high))};
  }
  F of(const Group& group, const uint8_t* p, int) const {
    const uint16x8_t codes = Word()(p);
    return group.is_finite ? from_halves(vandq_u16(vshlq_u16(codes, shift), keep)) : bare(codes);
  }
  F bare(uint16x8_t codes) const {  // before the power of two
    uint16x8_t half = vandq_u16(vshlq_u16(codes, shift), keep);
    if (has_nan)
      half = vorrq_u16(half, vandq_u16(vceqq_u16(vshlq_n_u16(half, 1), nan_code), vdupq_n_u16(0x7e00)));
    return from_halves(half);
  }
};

struct Table256 {
  const float* table;
  I mask;
  Table256(const float* table, int bits) : table(table), mask(set1_int((1 << bits) - 1)) {}
  F operator()(I codes) const { return gather(table, and_int(codes, mask)); }
};

// The scales of the blocks that share a vector, each as often as its block is long.
struct Spread {
  uint8x16_t low, high;
  explicit Spread(int block) {
    uint8_t from[32];
    for (int i = 0; i < 32; ++i) from[i] = static_cast<uint8_t>(i / 4 / block * 4 + i % 4);
    low = vld1q_u8(from);
    high = vld1q_u8(from + 16);
  }
  F operator()(const float* scales) const {
    const uint8_t* p = reinterpret_cast<const uint8_t*>(scales);
    const uint8x16x2_t all{{vld1q_u8(p), vld1q_u8(p + 16)}};
    return {vreinterpretq_f32_u8(vqtbl2q_u8(all, low)), vreinterpretq_f32_u8(vqtbl2q_u8(all, high))};
  }
};

// -- bytes for products of integers ------------------------------------------------------------

inline F zeros_as_one(F v) {
  return float_of(where({vceqzq_f32(v.a), vceqzq_f32(v.b)}, bits_of(set1(1.0f)), bits_of(v)));
}
inline F load_some(const float* p, int64_t count) {  // zeros beyond
  float some[kWidth] = {};
  std::memcpy(some, p, 4 * static_cast<size_t>(count < kWidth ? count : kWidth));
  return load(some);
}

inline I held(I v) { return v; }
// start + four products of bytes and codes in every lane
inline int32x4_t dot4(int32x4_t start, uint8x16_t bytes, int8x16_t x) {
#if defined(PQ_DOTPROD)
  // Signed times signed: bytes - 128, and 128 = 64 + 64 times the codes.
  const int8x16_t half = vdupq_n_s8(64);
  start = vdotq_s32(vdotq_s32(start, half, x), half, x);
  return vdotq_s32(start, vreinterpretq_s8_u8(veorq_u8(bytes, vdupq_n_u8(0x80))), x);
#else
  // A product of 8 by 8 bits fits in 16.
  const int16x8_t low = vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes))), vmovl_s8(vget_low_s8(x)));
  const int16x8_t high = vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(bytes))), vmovl_s8(vget_high_s8(x)));
  return vaddq_s32(start, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}

// A step of a line's codes as unsigned bytes. Of 2, 4 and 8 bits it is 32 bytes of the line, which
// have codes for kParts pairs of vectors: part j has the j-th code of every byte. Of any other width
// (kBits 0) it is 32 codes as they follow. kPlanes: tables; one is there or not where kBits is 0.
template <int kBits, int kPlanes>
struct Bytes8 {
  static constexpr bool kIsTable = kBits && kPlanes;
  static constexpr int kTables = kPlanes ? kPlanes : 1;
  static constexpr int kParts = kBits ? 8 / kBits : 1, kPartBytes = 32;
  struct Codes {
    uint8x16x2_t at[kParts];
  };
  uint8x16_t mask, flip, tables[kTables];
  int bits;
  bool has_table;
  int64_t step;
  explicit Bytes8(const Weight8& kind)
      : mask(vdupq_n_u8(kind.mask)),
        flip(vdupq_n_u8(kind.flip)),
        bits(kind.bits),
        has_table(kPlanes && kind.table),
        step(kBits ? 32 : 4 * kind.bits) {
    for (int plane = 0; has_table && plane < kPlanes; ++plane)
      tables[plane] = vld1q_u8(kind.table + 16 * plane);
  }
  Codes codes(const uint8_t* raw) const {
    Codes made;
    for (int j = 0; j < kParts; ++j)
      for (int half = 0; half < 2; ++half) {
        const int8x16_t down = vdupq_n_s8(static_cast<int8_t>(-j * (kBits & 7)));
        const uint8x16_t field = vshlq_u8(vld1q_u8(raw + 16 * half), down);
        made.at[j].val[half] = veorq_u8(vandq_u8(field, mask), flip);
      }
    return made;
  }
  Codes operator()(const uint8_t* p) const { return kBits || bits == 8 ? codes(p) : part(p, step); }
  Codes part(const uint8_t* p, int64_t left) const {
    uint8_t some[40] = {}, fields[32];
    std::memcpy(some, p, static_cast<size_t>(left < 0 ? 0 : left < step ? left : step));
    if (kBits || bits == 8) return codes(some);
    for (int i = 0; i < 32; ++i) {
      uint16_t word;
      std::memcpy(&word, some + i * bits / 8, 2);
      fields[i] = static_cast<uint8_t>(word >> i * bits % 8);
    }
    return codes(fields);
  }
  Codes mapped(Codes codes, int plane) const {
    if (!kPlanes || !(kBits || has_table)) return codes;
    for (auto& part : codes.at)
      for (auto& half : part.val) half = vqtbl1q_u8(tables[plane], vandq_u8(half, vdupq_n_u8(15)));
    return codes;
  }
  static Codes ones() {
    Codes made;
    for (auto& part : made.at) part = {{vdupq_n_u8(1), vdupq_n_u8(1)}};
    return made;
  }
  static void put(const int8_t* codes, uint8_t* to) { std::memcpy(to, codes, 32); }
  static const uint8_t* row(const uint8_t* x) { return x; }
  // start + the products of bytes and x, of four bytes in every lane
  static I dot(I start, const Codes& bytes, const uint8_t* x) {
    int32x4_t low = vreinterpretq_s32_u32(start.a), high = vreinterpretq_s32_u32(start.b);
    for (int j = 0; j < kParts; ++j) {
      low = dot4(low, bytes.at[j].val[0], vreinterpretq_s8_u8(vld1q_u8(x + 32 * j)));
      high = dot4(high, bytes.at[j].val[1], vreinterpretq_s8_u8(vld1q_u8(x + 32 * j + 16)));
    }
    return {vreinterpretq_u32_s32(low), vreinterpretq_u32_s32(high)};
  }
};

// The scales of the units of a step, each in kLanes lanes.
template <int kLanes>
inline F lane_scales(const float* scales) {
  return kLanes == kWidth ? set1(*scales) : Spread(kLanes)(scales);
}

class FlushSubnormals {
 public:
  FlushSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(before_ | uint64_t{1} << 24) : "memory");
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" : : "r"(before_) : "memory"); }
  FlushSubnormals(const FlushSubnormals&) = delete;

 private:
  uint64_t before_;
};

// Always inlined: GCC takes a function that only asks for memory for one without effect, and drops it.
inline __attribute__((always_inline)) void prefetch(const void* p) { __builtin_prefetch(p); }

}  // namespace pq::PQ_TARGET
