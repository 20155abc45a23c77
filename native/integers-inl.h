// Products of two quantized operands with integer codes: exact int32 sums of 32 products, each
// multiplied by its two scales and added up in float32.
//
// A weight's codes enter as bytes; a line is cut into units of 32, whose scales are one number each.
// `dot8` takes few rows of x and reads memory as it lies, one line after the other; `panel8` takes
// many and decodes a panel. Numbers of 32 bits are four bytes each, and two sums of 16 bits.
#pragma once

namespace pq::PQ_TARGET {

constexpr int kUnit = 32;
constexpr int kPanelDepth8 = 512;
// Scales in this range: their products are float32 numbers, and so are those with a unit's sum.
// Other products are left to float32.
constexpr float kSmallestScale = 0x1p-60f, kLargestScale = 0x1p60f;
// Numbers of 32 bits are multiples of 2^-31 at least.
constexpr float kSmallestOfPlanes = 0x1p-34f;

// Scales of a line, one per unit of 32, filled up with zeros; false where one is out of range.
inline bool unit_scales(const Weight& w, int64_t row, int64_t units, float* scratch, float* out,
                        float smallest = kSmallestScale) {
  if (has_zero(w.scale, w.grid_length, row, 0, w.grid_length)) return false;
  const int64_t used = w.grid_length == 1 ? units : (w.length + kUnit - 1) / kUnit;
  if (w.block == kUnit && w.grid_length > 1) {
    grid_line(w.scale, w.grid_length, row, 0, w.grid_length, out);
  } else {
    const float* from = scratch;
    const int64_t at = row * w.grid_length;
    const bool is_plain = w.scale.number == Number::kF32 && !w.scale.tensor_scale;
    if (is_plain && at + w.grid_length + kWidth <= w.scale.size)
      from = reinterpret_cast<const float*>(w.scale.data) + at;
    else
      grid_line(w.scale, w.grid_length, row, 0, w.grid_length, scratch);
    const int64_t each = w.grid_length == 1 ? units : w.block / kUnit;
    if (each < kWidth && kWidth % each == 0) {
      const Spread spread(static_cast<int>(each));
      const int64_t scales = kWidth / each;
      for (int64_t u = 0; u < used; u += kWidth, from += scales) store(out + u, spread(from));
    } else {
      for (int64_t u = 0; u < used; ++from)
        for (const int64_t end = min64(used, u + each); u < end; ++u) out[u] = *from;
    }
  }
  for (int64_t u = used; u < units; ++u) out[u] = 0.0f;
  const bool is_narrow = w.scale.number == Number::kF16 || w.scale.number == Number::kE4M3;
  if (is_narrow && !w.scale.tensor_scale) return true;
  const F low = set1(smallest), high = set1(kLargestScale);
  F over = zero();
  for (int64_t u = 0; u < units; u += kWidth) {
    const F v = zeros_as_one(magnitude(load_some(out + u, units - u)));
    over = max(over, max(sub(v, high), sub(low, v)));
  }
  return highest(over) <= 0.0f;
}

// The same where they are stored as float16, one a unit, and no number of `units` lies beyond.
PQ_INLINE const uint16_t* plain_halves(const Weight& w, int64_t row, int64_t units) {
  const bool is_plain = w.scale.number == Number::kF16 && !w.scale.tensor_scale;
  if (!is_plain || w.block != kUnit || w.grid_length != units) return nullptr;
  return reinterpret_cast<const uint16_t*>(w.scale.data) + row * units;
}

// -- x ----------------------------------------------------------------------------------------

// Rows of quantized x: codes as int8 (zeros to the padded length) and their scales.
inline bool pack_codes(const Weight& x, int64_t first, int64_t last, const Codes8& to) {
  [[maybe_unused]] const FlushSubnormals mode;
  bool fine = true;
  const Floats memory = make_floats(2 * x.grid_length + to.units + 128);
  float* const scratch = memory.get();
  for (int64_t row = first; row < last; ++row) {
    int8_t* codes = to.codes + row * to.padded;
    const uint8_t* p = x.data + row * x.line_bytes;
    if (x.bits == 8) std::memcpy(codes, p, static_cast<size_t>(x.length));
    for (int64_t i = x.bits == 8 ? x.length : 0; i < x.length; ++i) {
      const int64_t bit = i * x.bits;
      uint32_t word = p[bit / 8];
      if (bit % 8 + x.bits > 8) word |= static_cast<uint32_t>(p[bit / 8 + 1]) << 8;
      const uint32_t top = (word >> bit % 8) << (32 - x.value_bits);
      codes[i] = static_cast<int8_t>(static_cast<int32_t>(top) >> (32 - x.value_bits));
    }
    std::memset(codes + x.length, 0, static_cast<size_t>(to.padded - x.length));
    float* const scales = scratch + x.grid_length + 64;  // where a line may be written too far
    fine &= unit_scales(x, x.grid_row(row), to.units, scratch, scales);
    std::memcpy(to.scales + row * to.units, scales, 4 * static_cast<size_t>(to.units));
  }
  return fine;
}

// -- few rows ---------------------------------------------------------------------------------

template <class Body>
PQ_INLINE auto with_bytes8(const Weight8& kind, const Body& body) {
  if (kind.bits == 4 && kind.planes == 4) return body(Bytes8<4, 4>(kind));
  if (kind.bits == 4 && kind.planes == 1) return body(Bytes8<4, 1>(kind));
  if (kind.bits == 4) return body(Bytes8<4, 0>(kind));
  if (kind.bits == 8 && !kind.planes) return body(Bytes8<8, 0>(kind));
  if (kind.bits == 2) return body(Bytes8<2, 0>(kind));
  return body(Bytes8<0, 1>(kind));
}

template <class B>
constexpr int kStepCodes = 4 * kWidth * B::kParts;
// Of a step of a row of x: its codes, then a start for every lane.
template <class B>
constexpr int kRowBytes = B::kPartBytes * B::kParts + 4 * kWidth;

// Measured on Zen 5, where panels (of AVX-512) or float32 overtake. Four tables are worth it with 16
// lookups in a vector of 64 bytes only.
inline Step8 step8(const Weight8& kind) {
  return with_bytes8(kind, [&](const auto& bytes) {
    using B = std::decay_t<decltype(bytes)>;
    constexpr bool kIsWide = kWidth == 16, kIsNarrow = B::kParts > 1;
    const int plain = kIsWide ? (kIsNarrow ? 16 : 8) : (kIsNarrow ? 32 : 12);
    const int rows = kind.planes == 4 ? (kIsWide ? 12 : 0) : plain;
    return Step8{kStepCodes<B>, kRowBytes<B>, rows};
  });
}

// How many rows are multiplied at once, of so many: others are zeros.
PQ_INLINE int64_t rows_at_once(int64_t rows) { return rows > 2 ? 4 : rows; }

// Code kParts * i + j of `count` to part j, `apart` bytes after the one before: eight at a time.
template <int kParts>
PQ_INLINE void split(const int8_t* codes, int count, int8_t* to, int apart) {
  if constexpr (kParts == 1) {
    std::memcpy(to, codes, static_cast<size_t>(count));
  } else {
    int8_t even[256], odd[256];
    for (int i = 0; i < count; i += 8) {
      for (int j = 0; j < 2; ++j) {
        uint64_t eight;
        std::memcpy(&eight, codes + i, 8);
        eight = eight >> 8 * j & 0x00ff00ff00ff00ff;
        eight = (eight | eight >> 8) & 0x0000ffff0000ffff;
        eight |= eight >> 16;
        std::memcpy((j ? odd : even) + i / 2, &eight, 4);
      }
    }
    split<kParts / 2>(even, count / 2, to, 2 * apart);
    split<kParts / 2>(odd, count / 2, to + apart, 2 * apart);
  }
}

// x laid out for dot8, four rows after the other: step by step, and in it row by row, the codes in
// the order of the weight's bytes, and minus the sums of each lane's codes, times the weight's bias
// (lane by lane, so that what cancels does so in integers).
template <class B>
inline void put_step(const int8_t* codes, int32_t by, uint8_t* to) {
  int8_t parts[kStepCodes<B>];
  split<B::kParts>(codes, kStepCodes<B>, parts, 4 * kWidth);
  for (int j = 0; j < B::kParts; ++j) B::put(parts + j * 4 * kWidth, to + j * B::kPartBytes);
  const I totals = B::dot(set1_int(0), B::ones(), to);
  store_int(reinterpret_cast<int32_t*>(to + B::kParts * B::kPartBytes), mul_int(totals, set1_int(by)));
}

inline void pack_steps(const Codes8& x, int64_t rows, int64_t first, int64_t last, const Weight8& w,
                       const Steps& to) {
  const int32_t by = w.has_zero_point ? -1 : -w.bias;
  with_bytes8(w, [&](const auto& bytes) {
    using B = std::decay_t<decltype(bytes)>;
    for (int64_t m = first; m < last; ++m) {
      const int64_t before = m / 4 * 4, group = rows_at_once(min64(4, rows - before));
      float* const scales = to.scales + m * to.stride;
      const int64_t units = m < rows ? x.units : 0;
      if (units) std::memcpy(scales, x.scales + m * x.units, 4 * static_cast<size_t>(units));
      std::memset(scales + units, 0, 4 * static_cast<size_t>(to.stride - units));
      uint8_t* at = to.codes + (before * to.steps + m - before) * kRowBytes<B>;
      for (int64_t k = 0; k < to.steps * kStepCodes<B>; k += kStepCodes<B>) {
        int8_t some[kStepCodes<B>] = {};
        const int64_t count = m < rows ? min64(kStepCodes<B>, x.padded - k) : 0;
        if (count) std::memcpy(some, x.codes + m * x.padded + k, static_cast<size_t>(count));
        put_step<B>(some, by, at);
        at += group * kRowBytes<B>;
      }
    }
    return 0;
  });
}

// A line of a weight, or rows of x, as dot8 goes along them. scales: of each row's units, times the
// line's. zeros: the units' zero points, where there are any.
struct Dot8 {
  const uint8_t* x;
  const float *scales, *zeros;
  int64_t stride;
};

// Sums of products: one, or of numbers of 32 bits those of the lower and the upper half.
template <int kRows, int kPlanes>
struct Sums8 {
  static constexpr int kEach = kPlanes == 4 ? 2 : 1;
  F at[kRows][kEach];
};

template <int kRows, int kBits, int kPlanes>
PQ_INLINE Sums8<kRows, kPlanes> zeros8(const Bytes8<kBits, kPlanes>&) {
  Sums8<kRows, kPlanes> sums;
  for (auto& row : sums.at)
    for (F& each : row) each = zero();
  return sums;
}

// One step against kRows rows of x.
template <int kRows, bool kZero, int kBits, int kPlanes>
PQ_INLINE void dot8_at(const Bytes8<kBits, kPlanes>& bytes,
                       const typename Bytes8<kBits, kPlanes>::Codes& codes, const Dot8& at,
                       Sums8<kRows, kPlanes>& sums) {
  using B = Bytes8<kBits, kPlanes>;
  constexpr int kEach = Sums8<kRows, kPlanes>::kEach, kLanes = 8 / B::kParts;
  typename B::Codes planes[kPlanes ? kPlanes : 1];
#pragma GCC unroll 4
  for (int plane = 0; plane < (kPlanes ? kPlanes : 1); ++plane)
    planes[plane] = bytes.mapped(codes, plane);
  I zero_points{};
  if constexpr (kZero) zero_points = to_int(lane_scales<kLanes>(at.zeros));
#pragma GCC unroll 4
  for (int m = 0; m < kRows; ++m) {
    const uint8_t* const x = at.x + m * kRowBytes<B>;
    I start = load_int(reinterpret_cast<const int32_t*>(x + B::kParts * B::kPartBytes));
    if constexpr (kZero) start = mul_int(start, zero_points);
    const F scale = lane_scales<kLanes>(at.scales + m * at.stride);
#pragma GCC unroll 2
    for (int half = 0; half < kEach; ++half) {
      I total = B::dot(start, planes[kPlanes == 4 ? 2 * half + 1 : 0], x);
      if constexpr (kPlanes == 4) total = B::dot(shift_left<8>(total), planes[2 * half], x);
      sums.at[m][half] = fma(to_float(total), scale, sums.at[m][half]);
    }
  }
}

// A line: whole steps, with everything in registers, then those that may end beyond it.
template <int kRows, bool kZero, int kBits, int kPlanes>
PQ_INLINE void dot8_line(const Bytes8<kBits, kPlanes> bytes, const uint8_t* p, int64_t line_codes,
                         int64_t steps, Dot8 at, Sums8<kRows, kPlanes>& sums) {
  using B = Bytes8<kBits, kPlanes>;
  constexpr int kUnits = kStepCodes<B> / kUnit;
  // Few sums are kept twice, so that one need not wait for the other.
  constexpr int kTwice = kRows * sums.kEach < 4 ? 2 : 1;
  const int64_t whole = min64(line_codes / bytes.step, steps) / kTwice * kTwice;
  const auto next = [&]() PQ_INLINE_LAMBDA {
    p += bytes.step;
    at.x += kRows * kRowBytes<B>;
    at.scales += kUnits;
    at.zeros += kUnits;
  };
  Sums8<kRows, kPlanes> others = zeros8<kRows>(bytes);
  for (int64_t i = 0; i < whole; i += kTwice) {
    prefetch(p + kAhead);
    dot8_at<kRows, kZero>(bytes, bytes(p), at, sums);
    next();
    if constexpr (kTwice == 2) {
      prefetch(p + kAhead);
      dot8_at<kRows, kZero>(bytes, bytes(p), at, others);
      next();
    }
  }
  if (kTwice == 2)
    for (int m = 0; m < kRows; ++m)
      for (int half = 0; half < sums.kEach; ++half)
        sums.at[m][half] = add(sums.at[m][half], others.at[m][half]);
  for (int64_t i = whole; i < steps; ++i, next())
    dot8_at<kRows, kZero>(bytes, bytes.part(p, line_codes - i * bytes.step), at, sums);
}

template <int kRows, bool kZero, class B>
inline bool dot8_lines(const Weight& w, const Weight8& kind, const B& bytes, const Steps& x,
                       int64_t rows, int64_t first_line, int64_t first, int64_t last,
                       float* products, const Output& y) {
  const int64_t stride = x.stride;
  const float* const x_scales = x.scales;
  float *const scales = products + kRows * stride, *const zeros = scales + stride;
  float* const scratch = zeros + stride;
  const float smallest = kind.planes == 4 ? kSmallestOfPlanes : kSmallestScale;
  const int64_t line_codes = (w.length * w.bits + 7) / 8;
  for (int64_t n = first; n < last; ++n) {
    const int64_t line = first_line + n, row = w.grid_row(line);
    ask_ahead(w, w.scale, row);
    const uint16_t* const halves = plain_halves(w, row, stride - 16);
    if (!halves && !unit_scales(w, row, stride - 16, scratch, scales, smallest)) return false;
    if constexpr (kZero) {
      Weight by_zero = w;
      by_zero.scale = w.offset;
      ask_ahead(w, w.offset, row);
      unit_scales(by_zero, row, stride - 16, scratch, zeros);
    }
    for (int64_t u = 0; u < stride - 16; u += kWidth) {
      const F s = halves ? from_f16(halves + u) : load(scales + u);
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m)
        store(products + m * stride + u, mul(s, load(x_scales + m * stride + u)));
    }
    auto sums = zeros8<kRows>(bytes);
    dot8_line<kRows, kZero>(bytes, w.data + line * w.line_bytes, line_codes, x.steps,
                            {x.codes, products, zeros, stride}, sums);
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) {
      F total = sums.at[m][0];
      if (sums.kEach == 2) total = add(total, mul(sums.at[m][sums.kEach - 1], set1(65536.0f)));
      if (m < rows) write_sum(y, m * y.row_stride + n, sum(total) * kind.factor);
    }
  }
  return true;
}

// Four rows of x at a time, which stay in the first cache; some lines stay in the second.
template <bool kZero, class B>
inline bool dot8_groups(const Weight& w, const Weight8& kind, const B& bytes, const Steps& x,
                        int64_t rows, int64_t first_line, int64_t first, int64_t last,
                        const Output& y) {
  const int64_t item = y.type == Float::kF32 ? 4 : 2;
  const int64_t lines = rows <= 4 ? max64(1, last - first) : 16;
  const Floats products = make_floats(6 * x.stride + w.grid_length + 128);
  for (int64_t n = first; n < last; n += lines)
    for (int64_t m = 0; m < rows; m += 4) {
      const int64_t some = min64(4, rows - m), end = min64(last, n + lines);
      const Steps part{x.codes + m * x.steps * kRowBytes<B>, x.scales + m * x.stride, x.steps, some,
                       x.stride};
      const Output to{static_cast<char*>(y.data) + m * y.row_stride * item, y.type, y.row_stride};
      const auto run = some == 1   ? dot8_lines<1, kZero, B>
                       : some == 2 ? dot8_lines<2, kZero, B>
                                   : dot8_lines<4, kZero, B>;
      if (!run(w, kind, bytes, part, some, first_line, n, end, products.get(), to)) return false;
    }
  return true;
}

inline bool dot8(const Weight& w, const Weight8& kind, const Steps& x, int64_t rows,
                 int64_t first_line, int64_t first, int64_t last, const Output& y) {
  [[maybe_unused]] const FlushSubnormals mode;
  return with_bytes8(kind, [&](const auto& bytes) {
    using B = std::decay_t<decltype(bytes)>;
    if constexpr (!B::kTables) {
      if (kind.has_zero_point)
        return dot8_groups<true>(w, kind, bytes, x, rows, first_line, first, last, y);
    }
    return dot8_groups<false>(w, kind, bytes, x, rows, first_line, first, last, y);
  });
}

// -- many rows --------------------------------------------------------------------------------

#if defined(PQ_AVX512)

constexpr int kRows8 = 6;  // lines of a tile, by 2 vectors of rows of x

// x for panel8: panels of 32 rows: [k / 4][32 rows][4 codes], scales [unit][32 rows], and minus the
// sums of each unit's codes, times the weight's bias where that is the same everywhere.
inline void pack_panels8(const Codes8& x, const Weight8& kind, int64_t rows, int64_t first,
                         int64_t last, const Panels8& to) {
  const int32_t by = kind.has_zero_point ? -1 : -kind.bias;
  for (int64_t panel = first; panel < last; ++panel) {
    uint8_t* const codes = to.codes + panel * x.padded * 32;
    float* const scales = to.scales + panel * x.units * 32;
    int32_t* const sums = to.sums + panel * x.units * 32;
    for (int64_t m = 0; m < 32; ++m) {
      const int64_t row = panel * 32 + m;
      const int8_t* const from = x.codes + row * x.padded;
      for (int64_t u = 0; u < x.units; ++u) {
        int32_t total = 0;
        for (int64_t k = u * kUnit; k < (u + 1) * kUnit; k += 4) {
          uint32_t four = 0;
          if (row < rows) {
            std::memcpy(&four, from + k, 4);
            total += from[k] + from[k + 1] + from[k + 2] + from[k + 3];
          }
          std::memcpy(codes + k * 32 + m * 4, &four, 4);
        }
        scales[u * 32 + m] = row < rows ? x.scales[row * x.units + u] : 0.0f;
        sums[u * 32 + m] = total * by;
      }
    }
  }
}

// Some lines of a weight as bytes, with the scales and zero points of their units.
struct Lines8 {
  const uint8_t* codes;
  const float *scales, *zeros;  // zeros: null where the bias is the same everywhere
  int64_t stride, unit_stride;
};

// sums[r, 0..31] += the products of kRows lines and one panel, over `units` units.
template <int kRows, int kVectors>
inline void tile8(const Lines8 w, const uint8_t* x, const float* x_scales, const int32_t* x_sums,
                  int64_t units, float* sums, int64_t stride) {
  F acc[kRows][kVectors];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) acc[r][v] = load(sums + r * stride + v * 16);
  for (int64_t u = 0; u < units; ++u) {
    I part[kRows][kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const I start = load_int(x_sums + u * 32 + v * 16);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        part[r][v] = start;
        if (w.zeros) part[r][v] = mul_int(start, to_int(set1(w.zeros[r * w.unit_stride + u])));
      }
    }
#pragma GCC unroll 8
    for (int k = 0; k < kUnit / 4; ++k) {
      I right[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
        right[v] = _mm512_loadu_si512(x + (u * (kUnit / 4) + k) * 128 + v * 64);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        int32_t four;
        std::memcpy(&four, w.codes + r * w.stride + u * kUnit + k * 4, 4);
        const I left = set1_int(four);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
          part[r][v] = _mm512_dpbusd_epi32(part[r][v], left, right[v]);
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const F right = load(x_scales + u * 32 + v * 16);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r)
        acc[r][v] = fma(mul(to_float(part[r][v]), set1(w.scales[r * w.unit_stride + u])), right,
                        acc[r][v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) store(sums + r * stride + v * 16, acc[r][v]);
}

template <int kVectors>
inline void tiles8(int64_t lines, Lines8 w, const uint8_t* x, const float* x_scales,
                   const int32_t* x_sums, int64_t units, float* sums, int64_t stride) {
  constexpr int kTall = kVectors == 2 ? kRows8 : 12;
  for (int64_t r = 0; r < lines;) {
    const int64_t taken = lines - r >= kTall ? kTall : 1;
    if (taken == kTall)
      tile8<kTall, kVectors>(w, x, x_scales, x_sums, units, sums + r * stride, stride);
    else
      tile8<1, kVectors>(w, x, x_scales, x_sums, units, sums + r * stride, stride);
    w.codes += taken * w.stride;
    w.scales += taken * w.unit_stride;
    if (w.zeros) w.zeros += taken * w.unit_stride;
    r += taken;
  }
}

// scratch: sums of kPanelLines lines, scales and zero points of their units, one line of scales,
// and the bytes of a panel.
inline bool panel8(const Weight& w, const Weight8& kind, const Codes8& x, const Panels8& panels,
                   int64_t rows, int64_t first_line, int64_t first, int64_t last, float* scratch,
                   const Output& y) {
  [[maybe_unused]] const FlushSubnormals mode;
  const Bytes8<0, 1> bytes(kind);
  const int64_t units = x.units, count = (rows + 31) / 32, stride = count * 32;
  constexpr int64_t kStride8 = kPanelDepth8 + 64;
  float* const sums = scratch;
  float* const scales = sums + kPanelLines * stride;
  float* const zeros = scales + kPanelLines * units + 16;  // a line may be written too far
  float* const one_line = zeros + (kind.has_zero_point ? kPanelLines * units + 16 : 0);
  uint8_t* const codes = reinterpret_cast<uint8_t*>(one_line + w.grid_length + 64);
  const int64_t line_codes = (w.length * w.bits + 7) / 8;
  alignas(64) float out[kPanelLines];
  for (int64_t n = first; n < last; n += kPanelLines) {
    const int64_t lines = min64(kPanelLines, last - n);
    std::memset(sums, 0, 4 * static_cast<size_t>(lines * stride));
    for (int64_t i = 0; i < lines; ++i) {
      const int64_t row = w.grid_row(first_line + n + i);
      if (!unit_scales(w, row, units, one_line, scales + i * units)) return false;
      if (kind.has_zero_point) {
        Weight by_zero = w;
        by_zero.scale = w.offset;
        unit_scales(by_zero, row, units, one_line, zeros + i * units);
      }
    }
    for (int64_t k = 0; k < x.padded; k += kPanelDepth8) {
      const int64_t depth = min64(kPanelDepth8, x.padded - k), unit = k / kUnit;
      for (int64_t i = 0; i < lines; ++i) {
        const uint8_t* const line = w.data + (first_line + n + i) * w.line_bytes;
        const uint8_t* p = line + k * w.bits / 8;
        const uint8_t* const next = p + kPanelDepth8 * w.bits / 8;
        for (int64_t byte = 0; byte < kPanelDepth8 * w.bits / 8; byte += 64) prefetch(next + byte);
        for (int64_t at = 0; at < depth; at += 64, p += bytes.step) {
          const bool is_inside = p + bytes.step <= line + line_codes;
          const auto fields = is_inside ? bytes(p) : bytes.part(p, line + line_codes - p);
          _mm512_storeu_si512(codes + i * kStride8 + at, bytes.mapped(fields, 0).at[0]);
        }
      }
      const Lines8 left{codes, scales + unit, kind.has_zero_point ? zeros + unit : nullptr, kStride8,
                        units};
      for (int64_t panel = 0; panel < count; ++panel) {
        const uint8_t* const right = panels.codes + panel * x.padded * 32 + k * 32;
        const int64_t at = (panel * units + unit) * 32;
        const auto run = rows - panel * 32 <= 16 ? tiles8<1> : tiles8<2>;
        run(lines, left, right, panels.scales + at, panels.sums + at, depth / kUnit,
            sums + panel * 32, stride);
      }
    }
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t i = 0; i < lines; ++i) out[i] = sums[i * stride + m] * kind.factor;
      write_row(out, lines, y, m * y.row_stride + n);
    }
  }
  return true;
}

#endif

}  // namespace pq::PQ_TARGET
