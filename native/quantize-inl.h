// From numbers to codes: ranges of blocks, stored scales, codes, packed bytes.
#pragma once

#include <cmath>

#include "encode.h"

namespace pq::PQ_TARGET {

constexpr int kLinesRead = 16;  // lines of x read at a time: a transposed x is read in its own order
constexpr float kLargest = 3.40282347e38f;

// Elements [start, start + count) of `lines` rows of x as float32, zeros up to whole vectors.
inline void read_lines(const Activations& x, int64_t first, int64_t lines, int64_t start,
                       int64_t count, float* out, int64_t stride) {
  if (x.column_stride != 1 && x.row_stride == 1 && lines > 1) {
    Activations turned = x;
    turned.row_stride = x.column_stride;
    turned.column_stride = 1;
    alignas(64) float column[kLinesRead + 16];
    const int64_t item = x.type == Float::kF32 ? 4 : 2;
    const char* ahead = static_cast<const char*>(x.data) + first * item;
    for (int64_t k = 0; k < count; ++k) {
      prefetch(ahead + (start + min64(k + 16, count - 1)) * x.column_stride * item);
      row_of(turned, start + k, first, lines, column);
      for (int64_t i = 0; i < lines; ++i) out[i * stride + k] = column[i];
    }
  } else {
    for (int64_t i = 0; i < lines; ++i) row_of(x, first + i, start, count, out + i * stride);
  }
  for (int64_t i = 0; i < lines; ++i)
    for (int64_t k = count; k % kWidth; ++k) out[i * stride + k] = 0.0f;
}

// x where NaN and infinities are taken as asked. Elsewhere numbers are finite: the caller looked.
PQ_INLINE void saturate(float* x, int64_t count, bool for_range) {
  for (int64_t i = 0; i < count; ++i) {
    const float v = x[i];
    if (v != v)
      x[i] = 0.0f;
    else if (v > kLargest || v < -kLargest)
      x[i] = for_range ? 0.0f : v > 0 ? kLargest : -kLargest;
  }
}

inline bool all_finite(const Activations& x, int64_t first, int64_t last) {
  alignas(64) float row[kSegment + 16];
  F total = zero();  // x * 0 is 0, or NaN
  for (int64_t line = first; line < last; ++line)
    for (int64_t at = 0; at < x.columns; at += kSegment) {
      const int64_t count = min64(kSegment, x.columns - at);
      const float* p = row;
      if (x.type == Float::kF32 && x.column_stride == 1 && count % kWidth == 0)
        p = static_cast<const float*>(x.data) + line * x.row_stride + at;
      else
        read_lines(x, line, 1, at, count, row, 0);
      for (int64_t i = 0; i < count; i += kWidth) total = fma(load(p + i), zero(), total);
    }
  const float sum_of = sum(total);
  return sum_of == sum_of;
}

// -- ranges -----------------------------------------------------------------------------------

struct Extent {
  float low, high;
};

template <bool kMagnitude>
PQ_INLINE Extent extent_of(const float* x, int64_t count) {
  F low = set1(x[0]), high = kMagnitude ? magnitude(low) : low;
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const F v = load(x + i);
    high = max(high, kMagnitude ? magnitude(v) : v);
    if (!kMagnitude) low = min(low, v);
  }
  Extent found{kMagnitude ? 0.0f : lowest(low), highest(high)};
  for (; i < count; ++i) {
    const float v = kMagnitude && x[i] < 0 ? -x[i] : x[i];
    if (v > found.high) found.high = v;
    if (!kMagnitude && v < found.low) found.low = v;
  }
  return found;
}

// Subnormals count as zeros of their sign; of two zeros it does not matter which.
PQ_INLINE float flushed_number(float v) { return v < kTiny && v > -kTiny ? v * 0.0f : v; }

inline void ranges(const Weight& w, const Activations& x, bool saturates, int64_t first,
                   int64_t last, float* low, float* high) {
  [[maybe_unused]] const FlushSubnormals mode;
  alignas(64) float some[kLinesRead * kSegment + 64];
  // A long block is read in pieces, each merged into the same entry.
  const int64_t piece = w.block < kSegment ? kSegment / w.block * w.block : kSegment;
  for (int64_t line = first; line < last; line += kLinesRead) {
    const int64_t lines = min64(kLinesRead, last - line);
    for (int64_t at = 0; at < w.length; at += piece) {
      const int64_t count = min64(piece, w.length - at);
      read_lines(x, line, lines, at, count, some, kSegment);
      for (int64_t i = 0; i < lines; ++i) {
        float* values = some + i * kSegment;
        if (saturates) saturate(values, count, true);
        const int64_t row = w.grid_row(line + i) * w.grid_length;
        for (int64_t b = 0; b < count;) {
          const int64_t g = (at + b) / w.block;
          const int64_t end = min64(count, (g + 1) * w.block - at);
          if (low) {
            const Extent found = extent_of<false>(values + b, end - b);
            const float l = flushed_number(found.low), h = flushed_number(found.high);
            if (l < low[row + g]) low[row + g] = l;
            if (h > high[row + g]) high[row + g] = h;
          } else {
            const float h = flushed_number(extent_of<true>(values + b, end - b).high);
            if (h > high[row + g]) high[row + g] = h;
          }
          b = end;
        }
      }
    }
  }
}

// -- stored scales ----------------------------------------------------------------------------

PQ_INLINE uint32_t bits32(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  return bits;
}
PQ_INLINE float float32(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}
PQ_INLINE int ceil_small(float v) {  // of 0 <= v < 2^23
  const int whole = static_cast<int>(v);
  return whole + (static_cast<float>(whole) < v);
}

// Stores the smallest number of the type not below x >= 0 (saturating); returns it as float32, with
// UE8M0's 2^-127 as 2^-126 and half set.
PQ_INLINE float store_rounded_up(float x, const Scales& to, int64_t at, bool& half) {
  const uint32_t bits = bits32(x);
  half = false;
  switch (to.number) {
    case Number::kF16: {
      uint32_t h;
      if (x >= 65504.0f)
        h = 0x7bff;
      else if (x < 0x1p-14f)
        h = static_cast<uint32_t>(ceil_small(x * 0x1p24f));
      else
        h = ((bits - (112u << 23)) >> 13) + ((bits & 0x1fff) != 0);
      static_cast<uint16_t*>(to.data)[at] = static_cast<uint16_t>(h);
      return h < 0x400 ? static_cast<float>(h) * 0x1p-24f : float32((h << 13) + (112u << 23));
    }
    case Number::kBF16: {
      uint32_t h = (bits >> 16) + ((bits & 0xffff) != 0);
      if (h > 0x7f7f) h = 0x7f7f;
      static_cast<uint16_t*>(to.data)[at] = static_cast<uint16_t>(h);
      return float32(h << 16);
    }
    case Number::kUE8M0: {
      uint32_t e = (bits >> 23) + ((bits & 0x7fffff) != 0);
      if (e > 254) e = 254;
      static_cast<uint8_t*>(to.data)[at] = static_cast<uint8_t>(e);
      half = e == 0;
      return half ? kTiny : float32(e << 23);
    }
    case Number::kE4M3: {
      uint32_t c;
      if (x >= 448.0f)
        c = 0x7e;
      else if (x < 0x1p-6f)
        c = static_cast<uint32_t>(ceil_small(x * 512.0f));
      else
        c = (bits >> 20) + ((bits & 0xfffff) != 0) - (120u << 3);
      static_cast<uint8_t*>(to.data)[at] = static_cast<uint8_t>(c);
      return c < 8 ? static_cast<float>(c) * 0x1p-9f : float32((c << 20) + (120u << 23));
    }
    default: {
      const float v = x > kLargest ? kLargest : x;
      static_cast<float*>(to.data)[at] = v;
      return v;
    }
  }
}

// -- codes ------------------------------------------------------------------------------------

struct Factor {
  float before, reciprocal;  // t = x * before * reciprocal
};

PQ_INLINE Factor factor_of(float value, bool half) {
  float before = half ? 2.0f : 1.0f;
  if (value > 0x1p126f || value < -0x1p126f) {  // whose reciprocal would be subnormal
    before *= 0x1p-24f;
    value *= 0x1p-24f;
  }
  return {before, value == 0.0f ? 0.0f : 1.0f / value};
}

struct IntegerCode {
  F low, high;
  I mask;
  F offset{};
  bool has_zero_point, rounds_first;
  explicit IntegerCode(const Encoder& e)
      : low(set1(e.low)),
        high(set1(e.high)),
        mask(set1_int((1 << e.value_bits) - 1)),
        has_zero_point(e.offset_kind == OffsetKind::kZeroPoint),
        rounds_first(e.rounds_first) {}
  PQ_INLINE I operator()(F t) const {
    if (has_zero_point)
      t = rounds_first ? add(round_even(t), offset) : round_even(add(t, offset));
    return and_int(to_int(min(max(t, low), high)), mask);
  }
};

struct MinifloatCode {
  F highest, smallest_normal, to_subnormal, offset{};
  I sign, rebias;
  int drop;
  explicit MinifloatCode(const Encoder& e)
      : highest(set1(e.high)),
        smallest_normal(set1(float32(static_cast<uint32_t>(128 - e.bias) << 23))),
        to_subnormal(set1(float32(static_cast<uint32_t>(126 + e.bias + e.mantissa_bits) << 23))),
        sign(set1_int(1 << (e.value_bits - 1))),
        rebias(set1_int((127 - e.bias) << e.mantissa_bits)),
        drop(23 - e.mantissa_bits) {}
  PQ_INLINE I operator()(const F& t) const {
    const F v = min(magnitude(t), highest);
    const I normal = sub_int(round_bits(v, drop), rebias);
    const I code = below(v, smallest_normal, to_int(mul(v, to_subnormal)), normal);
    return or_int(code, where_negative(t, sign));
  }
};

// The entries of a table by the number of midpoints below t, found by halving.
template <int kSize>
struct TableCode {
  alignas(64) float edges[kSize], codes[kSize];
  F offset{};
  explicit TableCode(const Encoder& e) {
    for (int i = 0; i < kSize; ++i) {
      const bool is_edge = i < e.midpoint_count;
      edges[i] = is_edge ? e.midpoints[i] : HUGE_VALF;
      codes[i] = i <= e.midpoint_count ? e.codes[i] : 0.0f;
    }
  }
  PQ_INLINE I operator()(const F& t) const {
    I index = set1_int(0);
    if constexpr (kSize == 16) {
      const Table16 edge(edges), code(codes);
#pragma GCC unroll 4
      for (int by = 8; by; by /= 2)
        index = step_above(t, edge(add_int(index, set1_int(by - 1))), index, by);
      return to_int(code(index));
    }
    for (int by = kSize / 2; by; by /= 2)
      index = step_above(t, gather(edges, add_int(index, set1_int(by - 1))), index, by);
    return to_int(gather(codes, index));
  }
};

// `count` numbers of one block: whole vectors of codes.
template <class C>
PQ_INLINE void encode_run(const C& code, OffsetKind kind, Factor by, float offset, const float* x,
                          int64_t count, uint8_t* out) {
  const F before = set1(by.before), reciprocal = set1(by.reciprocal), bias = set1(offset);
  for (int64_t i = 0; i < count; i += kWidth) {
    F t = load(x + i);
    if (kind == OffsetKind::kBias) t = sub(t, bias);
    if (by.before != 1.0f) t = mul(t, before);
    store_bytes(out + i, code(mul(t, reciprocal)));
  }
}

// Fields of 1 to 8 bits, a byte each, into the bytes of a line (all of them; the rest is zero).
inline void pack_line(const uint8_t* fields, int64_t count, const Encoder& e, const Codes& to,
                      int64_t line) {
  uint8_t* out = to.data + line * to.line_bytes;
  if (e.store_bits == 8) {
    if (!e.extends_sign) {
      std::memcpy(out, fields, static_cast<size_t>(count));
      std::memset(out + count, 0, static_cast<size_t>(to.line_bytes - count));
      return;
    }
    const uint8_t sign = static_cast<uint8_t>(1u << (e.value_bits - 1));
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<uint8_t>((fields[i] ^ sign) - sign);
    std::memset(out + count, 0, static_cast<size_t>(to.line_bytes - count));
    return;
  }
  const int bits = e.store_bits;
  int64_t i = 0;
  uint8_t* const end = to.data + (line + 1) * to.line_bytes;
  for (; i + 8 <= count && out + 8 <= end; i += 8, out += bits) {
    uint64_t eight;
    std::memcpy(&eight, fields + i, 8);
    eight = join_fields(eight, bits);
    std::memcpy(out, &eight, 8);
  }
  for (; i < count; i += 8) {
    uint8_t some[8] = {};
    std::memcpy(some, fields + i, static_cast<size_t>(min64(8, count - i)));
    uint64_t eight;
    std::memcpy(&eight, some, 8);
    eight = join_fields(eight, bits);
    const int64_t bytes = min64(bits, end - out);
    std::memcpy(out, &eight, static_cast<size_t>(bytes));
    out += bytes;
  }
  if (out < end) std::memset(out, 0, static_cast<size_t>(end - out));
}

template <class Body>
PQ_INLINE void with_code(const Encoder& e, Body body) {
  if (e.code == Code::kInteger)
    body(IntegerCode(e));
  else if (e.code == Code::kMinifloat)
    body(MinifloatCode(e));
  else if (e.midpoint_count < 16)
    body(TableCode<16>(e));
  else
    body(TableCode<256>(e));
}

// Lines in pieces of `step` elements: calls piece(line, values, at, count, fields) with the numbers,
// and packs the fields that it writes.
template <class Piece>
PQ_INLINE void each_piece(const Weight& w, const Activations& x, const Encoder& e, int64_t step,
                          int64_t first, int64_t last, const Codes& to, const Piece& piece) {
  const int64_t together = x.column_stride == 1 ? 1 : min64(kLinesRead, last - first);
  // Blocks are read by whole vectors, so one that ends within a vector reads beyond itself.
  const bool ends_whole = w.block % kWidth == 0 || w.grid_length == 1;
  const bool in_place = x.column_stride == 1 && x.type == Float::kF32 && !e.saturates && ends_whole;
  const int64_t stride = (w.length + 63) / 64 * 64 + 64, room = (step + 63) / 64 * 64 + 16;
  float* const some = new float[static_cast<size_t>(together * room + together * stride / 4)];
  uint8_t* const fields = reinterpret_cast<uint8_t*>(some + together * room);
  for (int64_t line = first; line < last; line += together) {
    const int64_t lines = min64(together, last - line);
    for (int64_t at = 0; at < w.length; at += step) {
      const int64_t count = min64(step, w.length - at);
      if (in_place && count % kWidth == 0) {
        const float* row = static_cast<const float*>(x.data) + line * x.row_stride + at;
        piece(line, row, at, count, fields + at);
        continue;
      }
      read_lines(x, line, lines, at, count, some, room);
      for (int64_t i = 0; i < lines; ++i) {
        if (e.saturates) saturate(some + i * room, count, false);
        piece(line + i, some + i * room, at, count, fields + i * stride + at);
      }
    }
    for (int64_t i = 0; i < lines; ++i) pack_line(fields + i * stride, w.length, e, to, line + i);
  }
  delete[] some;
}

inline void encode(const Weight& w, const Activations& x, const Encoder& e, const Divisors& by,
                   int64_t first, int64_t last, const Codes& to) {
  [[maybe_unused]] const FlushSubnormals mode;
  with_code(e, [&](auto code) PQ_INLINE_LAMBDA {
    const auto piece = [&](int64_t line, const float* values, int64_t at, int64_t count,
                           uint8_t* out) {
      const int64_t row = w.grid_row(line) * w.grid_length;
      for (int64_t b = 0; b < count;) {
        const int64_t g = (at + b) / w.block, entry = row + g;
        const int64_t end = min64(count, (g + 1) * w.block - at);
        const float offset = by.offset ? by.offset[entry] : 0.0f;
        code.offset = set1(offset);
        const Factor factor = factor_of(by.value[entry], by.half && by.half[entry] != 1.0f);
        encode_run(code, e.offset_kind, factor, offset, values + b, end - b, out + b);
        b = end;
      }
    };
    // A long block comes in pieces.
    const int64_t step = w.block < kSegment ? kSegment / w.block * w.block : kSegment;
    each_piece(w, x, e, step, first, last, to, piece);
  });
}

inline void quantize(const Weight& w, const Activations& x, const Encoder& e, const Scales& scales,
                     int64_t first, int64_t last, const Codes& to) {
  [[maybe_unused]] const FlushSubnormals mode;
  with_code(e, [&](auto code) PQ_INLINE_LAMBDA {
    // Step by step over all blocks of a piece, so that none waits for another's division.
    alignas(64) float numbers[kSegment + 16], reciprocals[kSegment + 16];
    const F range = set1(scales.range), one = set1(1.0f);
    const auto piece = [&](int64_t line, const float* values, int64_t at, int64_t count,
                           uint8_t* out) {
      const int64_t entry = line * w.grid_length + at / w.block;
      const int64_t blocks = (count + w.block - 1) / w.block;
      for (int64_t g = 0; g < blocks; ++g) {
        const int64_t from = g * w.block, length = min64(w.block, count - from);
        numbers[g] = extent_of<true>(values + from, length).high;
      }
      for (int64_t g = 0; g < blocks; g += kWidth)
        store(numbers + g, divide(load(numbers + g), range));
      bool is_plain = true;
      for (int64_t g = 0; g < blocks; ++g) {
        bool half;
        numbers[g] = store_rounded_up(numbers[g], scales, entry + g, half);
        is_plain &= !half && numbers[g] > 0.0f && numbers[g] <= 0x1p126f;
      }
      for (int64_t g = 0; g < blocks; g += kWidth)
        store(reciprocals + g, divide(one, load(numbers + g)));
      for (int64_t g = 0; g < blocks; ++g) {
        Factor by{1.0f, reciprocals[g]};
        if (!is_plain)
          by = factor_of(numbers[g], scales.number == Number::kUE8M0 &&
                                         !static_cast<const uint8_t*>(scales.data)[entry + g]);
        const int64_t from = g * w.block;
        encode_run(code, OffsetKind::kNone, by, 0.0f, values + from, min64(w.block, count - from),
                   out + from);
      }
    };
    const int64_t step = w.block < kSegment ? kSegment / w.block * w.block : w.block;
    each_piece(w, x, e, step, first, last, to, piece);
  });
}

// -- sums that calibrations choose by -----------------------------------------------------------

// The sum of `count` numbers by halving, which it overwrites: an order that depends on count alone.
PQ_INLINE double fixed_sum(double* v, int64_t count) {
  while (count > 1) {
    const int64_t half = count / 2;
    for (int64_t i = 0; i < half; ++i) v[i] += v[half + i];
    if (count % 2) v[half] = v[count - 1];
    count = half + count % 2;
  }
  return count ? v[0] : 0.0;
}

// The errors of one block's round trip, squared.
template <class C>
PQ_INLINE void squared_errors(const C& code, const Encoder& e, Factor by, float scale, bool half,
                              float offset, const float* numbers, const float* x, int64_t count,
                              double* out) {
  alignas(64) float errors[2][kWidth];
  for (int64_t i = 0; i < count; i += kWidth) {
    const F from = mul(load(x + i), set1(1.0f));  // subnormals as zeros
    F t = from;
    if (e.offset_kind == OffsetKind::kBias) t = sub(t, set1(offset));
    if (by.before != 1.0f) t = mul(t, set1(by.before));
    F v = gather(numbers, code(mul(t, set1(by.reciprocal))));
    if (e.offset_kind == OffsetKind::kZeroPoint) v = sub(v, set1(offset));
    if (half) v = mul(v, set1(0.5f));
    v = mul(v, set1(scale));
    if (e.offset_kind == OffsetKind::kBias) v = add(v, set1(offset));
    store(errors[0], v);
    store(errors[1], from);
    for (int j = 0; j < kWidth; ++j) {  // may write too far: the caller's zeros come later
      const double error = static_cast<double>(errors[0][j]) - static_cast<double>(errors[1][j]);
      out[i + j] = error * error;
    }
  }
}

// Per block of lines [first, last), each in one line: the sum of magnitudes, or (with numbers, the
// value of every code) of the squared errors that quantizing by known divisors makes.
inline void block_sums(const Weight& w, const Activations& x, const Encoder& e, const Divisors& by,
                       const float* numbers, int64_t first, int64_t last, double* out) {
  [[maybe_unused]] const FlushSubnormals mode;
  float* const values = new float[static_cast<size_t>(w.block + 64)];
  double* const terms = new double[static_cast<size_t>(w.block + 64)];
  with_code(e, [&](auto code) PQ_INLINE_LAMBDA {
    for (int64_t line = first; line < last; ++line)
      for (int64_t g = 0; g < w.grid_length; ++g) {
        const int64_t entry = line * w.grid_length + g, at = g * w.block;
        const int64_t count = min64(w.block, w.length - at);
        read_lines(x, line, 1, at, count, values, 0);
        if (e.saturates) saturate(values, count, true);
        if (numbers) {
          const bool half = by.half && by.half[entry] != 1.0f;
          const float offset = by.offset ? by.offset[entry] : 0.0f;
          code.offset = set1(offset);
          squared_errors(code, e, factor_of(by.value[entry], half), by.value[entry], half, offset,
                         numbers, values, count, terms);
        } else {
          for (int64_t i = 0; i < count; ++i)
            terms[i] = static_cast<double>(values[i] < 0 ? -flushed_number(values[i]) : flushed_number(values[i]));
        }
        for (int64_t i = count; i < w.block; ++i) terms[i] = 0.0;
        out[entry] = fixed_sum(terms, w.block);
      }
  });
  delete[] values;
  delete[] terms;
}

}  // namespace pq::PQ_TARGET
