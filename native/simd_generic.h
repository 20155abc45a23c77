// Plain C++, for any processor: 8 lanes as arrays, which the compiler may or may not vectorize.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "weight.h"

namespace pq::PQ_TARGET {

constexpr int kWidth = 8;
constexpr int kTileRows = 4;
constexpr bool kWalks = false;  // fewer loops to compile, where none is fast

struct F {
  float at[kWidth];
};
struct I {
  uint32_t at[kWidth];
};

template <class T, class Body>
inline T each(Body body) {
  T made;
  for (int lane = 0; lane < kWidth; ++lane) made.at[lane] = body(lane);
  return made;
}

inline uint32_t bits_of(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}
// What hardware does elsewhere: subnormal results are zeros of their sign.
inline float flushed(float v) {
  return (bits_of(v) & 0x7f800000u) ? v : float_of(bits_of(v) & 0x80000000u);
}

inline F load(const float* p) { return each<F>([&](int i) { return p[i]; }); }
inline void store(float* p, const F& v) { std::memcpy(p, v.at, sizeof v.at); }
inline F set1(float v) { return each<F>([&](int) { return v; }); }
inline F zero() { return set1(0.0f); }
inline F add(const F& a, const F& b) { return each<F>([&](int i) { return flushed(flushed(a.at[i]) + flushed(b.at[i])); }); }
inline F sub(const F& a, const F& b) { return each<F>([&](int i) { return flushed(flushed(a.at[i]) - flushed(b.at[i])); }); }
inline F mul(const F& a, const F& b) { return each<F>([&](int i) { return flushed(flushed(a.at[i]) * flushed(b.at[i])); }); }
inline F fma(const F& a, const F& b, const F& c) { return each<F>([&](int i) { return a.at[i] * b.at[i] + c.at[i]; }); }
inline float sum(const F& v) {
  float total = 0.0f;
  for (float x : v.at) total += x;
  return total;
}
inline F keep(const F& v, int n) { return each<F>([&](int i) { return i < n ? v.at[i] : 0.0f; }); }
inline void store_part(float* p, const F& v, int n) { std::memcpy(p, v.at, 4 * static_cast<size_t>(n)); }

inline float half_to_float(uint32_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, rest = half & 1023;
  if (exponent == 31) return float_of(sign | 0x7f800000u | rest << 13);
  if (exponent) return float_of(sign | (exponent + 112) << 23 | rest << 13);
  const float magnitude = static_cast<float>(rest) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}
inline uint16_t float_to_half(float v) {
  const uint32_t bits = bits_of(v), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // a subnormal: adding 0.5 leaves its bits at the end
    const float shifted = float_of(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of(shifted) - bits_of(0.5f)));
  }
  const uint32_t up = magnitude + 0xfffu + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | ((up >> 13) - (112u << 10)));
}

inline F from_f16(const uint16_t* p) { return each<F>([&](int i) { return half_to_float(p[i]); }); }
inline F from_bf16(const uint16_t* p) { return each<F>([&](int i) { return float_of(static_cast<uint32_t>(p[i]) << 16); }); }
inline F from_u8(const uint8_t* p) { return each<F>([&](int i) { return static_cast<float>(p[i]); }); }
inline F from_ue8m0(const uint8_t* p) { return each<F>([&](int i) { return float_of(static_cast<uint32_t>(p[i]) << 23); }); }
inline void to_f16(uint16_t* p, const F& v) {
  for (int i = 0; i < kWidth; ++i) p[i] = float_to_half(v.at[i]);
}
inline void to_bf16(uint16_t* p, const F& v) {
  for (int i = 0; i < kWidth; ++i) {
    const uint32_t bits = bits_of(v.at[i]);
    const uint32_t up = bits + 0x7fffu + (bits >> 16 & 1);
    p[i] = static_cast<uint16_t>((v.at[i] != v.at[i] ? bits | 0x400000u : up) >> 16);
  }
}

inline F divide(const F& a, const F& b) { return each<F>([&](int i) { return flushed(flushed(a.at[i]) / flushed(b.at[i])); }); }
// 8 fields of `bits` bits, a byte each, side by side: joined in pairs, three times.
inline uint64_t join_fields(uint64_t eight, int bits) {
  const uint64_t even[] = {0x00ff00ff00ff00ffull, 0x0000ffff0000ffffull, 0x00000000ffffffffull};
  for (int i = 0; i < 3; ++i)
    eight = (eight & even[i]) | ((eight & ~even[i]) >> ((8 - bits) << i));
  return eight;
}
inline F magnitude(const F& v) { return each<F>([&](int i) { return std::fabs(v.at[i]); }); }
inline F max(const F& a, const F& b) { return each<F>([&](int i) { return a.at[i] > b.at[i] ? a.at[i] : b.at[i]; }); }
inline F min(const F& a, const F& b) { return each<F>([&](int i) { return a.at[i] < b.at[i] ? a.at[i] : b.at[i]; }); }
inline float highest(const F& v) {
  float found = v.at[0];
  for (float x : v.at) found = x > found ? x : found;
  return found;
}
inline float lowest(const F& v) {
  float found = v.at[0];
  for (float x : v.at) found = x < found ? x : found;
  return found;
}
inline F round_even(const F& v) { return each<F>([&](int i) { return std::nearbyint(v.at[i]); }); }
inline I set1_int(int v) { return each<I>([&](int) { return static_cast<uint32_t>(v); }); }
inline I and_int(const I& a, const I& b) { return each<I>([&](int i) { return a.at[i] & b.at[i]; }); }
inline I or_int(const I& a, const I& b) { return each<I>([&](int i) { return a.at[i] | b.at[i]; }); }
inline I add_int(const I& a, const I& b) { return each<I>([&](int i) { return a.at[i] + b.at[i]; }); }
inline I sub_int(const I& a, const I& b) { return each<I>([&](int i) { return a.at[i] - b.at[i]; }); }
inline I to_int(const F& v) {
  return each<I>([&](int i) { return static_cast<uint32_t>(static_cast<int32_t>(std::nearbyint(v.at[i]))); });
}
inline void store_bytes(uint8_t* p, const I& v) {
  for (int i = 0; i < kWidth; ++i) p[i] = static_cast<uint8_t>(v.at[i]);
}
inline I step_above(const F& t, const F& edge, const I& index, int by) {
  return each<I>([&](int i) { return index.at[i] + (t.at[i] > edge.at[i] ? static_cast<uint32_t>(by) : 0u); });
}
inline I round_bits(const F& v, int drop) {
  return each<I>([&](int i) {
    const uint32_t bits = bits_of(v.at[i]);
    return (bits + (bits >> drop & 1) + (1u << (drop - 1)) - 1) >> drop;
  });
}
inline I below(const F& v, const F& edge, const I& a, const I& b) {
  return each<I>([&](int i) { return v.at[i] < edge.at[i] ? a.at[i] : b.at[i]; });
}
inline I where_negative(const F& v, const I& bit) {
  return each<I>([&](int i) { return bits_of(v.at[i]) >> 31 ? bit.at[i] : 0u; });
}
inline F gather(const float* table, const I& at) { return each<F>([&](int i) { return table[at.at[i]]; }); }

// -- codes ------------------------------------------------------------------------------------

struct Packed8 {  // 8 codes of up to 8 bits lie in one 64-bit word
  int bits;
  int64_t step;
  explicit Packed8(int bits) : bits(bits), step(bits) {}
  I operator()(const uint8_t* p) const {
    uint64_t word = 0;
    for (int i = 0; i < bits; ++i) word |= static_cast<uint64_t>(p[i]) << 8 * i;
    return each<I>([&](int i) { return static_cast<uint32_t>(word >> bits * i); });
  }
};
struct Small : Packed8 {
  using Packed8::Packed8;
};
struct Large : Packed8 {
  using Packed8::Packed8;
};
struct Byte : Packed8 {
  explicit Byte(int) : Packed8(8) {}
};

// -- numbers ----------------------------------------------------------------------------------

struct Table16 {
  float entries[16];
  explicit Table16(const float* table) { std::memcpy(entries, table, sizeof entries); }
  F operator()(const I& codes) const { return each<F>([&](int i) { return entries[codes.at[i] & 15]; }); }
};

struct Integer {
  int shift;
  bool is_signed;
  Integer(int bits, bool is_signed) : shift(32 - bits), is_signed(is_signed) {}
  F operator()(const I& codes) const {
    return each<F>([&](int i) {
      const uint32_t top = codes.at[i] << shift;
      return is_signed ? static_cast<float>(static_cast<int32_t>(top) >> shift)
                       : static_cast<float>(top >> shift);
    });
  }
};

struct Mini {
  Minifloat m;
  explicit Mini(const Minifloat& m) : m(m) {}
  F operator()(const I& codes) const {
    return each<F>([&](int i) {
      const uint32_t rest = codes.at[i] & m.rest_mask;
      if (m.nan_code && rest == m.nan_code) return float_of(0x7fc00000u);
      const uint32_t sign = (codes.at[i] & m.sign_mask) << m.sign_shift;
      return half_to_float(sign | rest << m.rest_shift) * m.power;
    });
  }
};

struct Word : Byte {
  Word() : Byte(8) {}
};
struct Float8 : Mini {
  static constexpr bool kFolds = false;  // whether `of` leaves `power` to the scale
  struct Group {};                       // what is found out about 4 * kWidth codes at once
  using Mini::Mini;
  Group group(const uint8_t*) const { return {}; }
  // Vector j of a group, whose codes begin at p.
  F of(const Group&, const uint8_t* p, int) const { return (*this)(Word()(p)); }
};

struct Table256 {
  const float* table;
  uint32_t mask;
  Table256(const float* table, int bits) : table(table), mask((1u << bits) - 1) {}
  F operator()(const I& codes) const { return each<F>([&](int i) { return table[codes.at[i] & mask]; }); }
};

struct Spread {
  int block;
  explicit Spread(int block) : block(block) {}
  F operator()(const float* scales) const { return each<F>([&](int i) { return scales[i / block]; }); }
};

// -- bytes for products of integers ----------------------------------------------------------

inline F zeros_as_one(const F& v) { return each<F>([&](int i) { return v.at[i] == 0.0f ? 1.0f : v.at[i]; }); }
inline F load_some(const float* p, int64_t count) {  // zeros beyond
  return each<F>([&](int i) { return i < count ? p[i] : 0.0f; });
}

inline I held(I v) { return v; }
inline I load_int(const int32_t* p) { return each<I>([&](int i) { return static_cast<uint32_t>(p[i]); }); }
inline void store_int(int32_t* p, const I& v) { std::memcpy(p, v.at, sizeof v.at); }
inline I mul_int(const I& a, const I& b) { return each<I>([&](int i) { return a.at[i] * b.at[i]; }); }
inline F to_float(const I& v) { return each<F>([&](int i) { return static_cast<float>(static_cast<int32_t>(v.at[i])); }); }

// A step of a line's codes as unsigned bytes. Of 2, 4 and 8 bits it is 32 bytes of the line, which
// have codes for kParts vectors: part j has the j-th code of every byte. Of any other width (kBits 0)
// it is 32 codes as they follow. kPlanes: tables; one is there or not where kBits is 0.
template <int kBits, int kPlanes>
struct Bytes8 {
  static constexpr bool kIsTable = kBits && kPlanes;
  static constexpr int kTables = kPlanes ? kPlanes : 1;
  static constexpr int kParts = kBits ? 8 / kBits : 1, kPartBytes = 32;
  struct Codes {
    uint8_t at[kParts][32];
  };
  Weight8 kind;
  int64_t step;
  explicit Bytes8(const Weight8& kind) : kind(kind), step(kBits ? 32 : 4 * kind.bits) {}
  Codes operator()(const uint8_t* p) const { return part(p, step); }
  Codes part(const uint8_t* p, int64_t left) const {
    uint8_t some[40] = {};
    std::memcpy(some, p, static_cast<size_t>(left < 0 ? 0 : left < step ? left : step));
    Codes made;
    for (int i = 0; i < 32 * kParts; ++i) {
      const int bit = i * kind.bits;
      const uint32_t word = some[bit / 8] | some[bit / 8 + 1] << 8;
      made.at[i % kParts][i / kParts] =
          static_cast<uint8_t>((word >> bit % 8 & kind.mask) ^ kind.flip);
    }
    return made;
  }
  Codes mapped(Codes codes, int plane) const {
    if (!kPlanes || !kind.table) return codes;
    for (auto& part : codes.at)
      for (uint8_t& code : part) code = kind.table[16 * plane + (code & 15)];
    return codes;
  }
  static Codes ones() {
    Codes made;
    std::memset(made.at, 1, sizeof made.at);
    return made;
  }
  static void put(const int8_t* codes, uint8_t* to) { std::memcpy(to, codes, 32); }
  static const uint8_t* row(const uint8_t* x) { return x; }
  // start + the products of bytes and x, of four bytes in every lane
  static I dot(const I& start, const Codes& bytes, const uint8_t* x) {
    return each<I>([&](int lane) {
      int32_t total = static_cast<int32_t>(start.at[lane]);
      for (int j = 0; j < kParts; ++j)
        for (int i = 4 * lane; i < 4 * lane + 4; ++i)
          total += bytes.at[j][i] * static_cast<int8_t>(x[32 * j + i]);
      return static_cast<uint32_t>(total);
    });
  }
};

// The scales of the units of a step, each in kLanes lanes.
template <int kLanes>
inline F lane_scales(const float* scales) {
  return Spread(kLanes)(scales);
}

struct FlushSubnormals {};  // the arithmetic above does it

inline void prefetch(const void*) {}

}  // namespace pq::PQ_TARGET
