// Products of two quantized operands with integer codes: exact int32 sums of 32 products, each
// multiplied by its two scales and added up in float32.
//
// A weight's codes enter as bytes; a line is cut into units of 32, whose scales are one number each.
// `dot8` takes few rows of x and reads memory as it lies; `panel8` takes many and decodes a panel.
#pragma once

namespace pq::PQ_TARGET {

constexpr int kUnit = 32;
constexpr int kPanelDepth8 = 512;
// Scales in this range: their products are float32 numbers, and so are those with a unit's sum.
// Other products are left to float32.
constexpr float kSmallestScale = 0x1p-60f, kLargestScale = 0x1p60f;

// Scales of a line, one per unit of 32, filled up with zeros; false where one is out of range.
inline bool unit_scales(const Weight& w, int64_t row, int64_t units, float* scratch, float* out) {
  if (has_zero(w.scale, w.grid_length, row, 0, w.grid_length)) return false;
  if (w.block == kUnit && w.grid_length > 1) {
    grid_line(w.scale, w.grid_length, row, 0, w.grid_length, out);
    for (int64_t u = w.grid_length; u < units; ++u) out[u] = 0.0f;
  } else {
    grid_line(w.scale, w.grid_length, row, 0, w.grid_length, scratch);
    const int64_t each = w.grid_length == 1 ? units : w.block / kUnit;
    for (int64_t u = 0, g = 0; u < units; ++g) {
      const float s = scratch[g < w.grid_length ? g : w.grid_length - 1];
      for (const int64_t end = min64(units, u + each); u < end; ++u) out[u] = s;
    }
  }
  const bool is_narrow = w.scale.number == Number::kF16 || w.scale.number == Number::kE4M3;
  if (is_narrow && !w.scale.tensor_scale) return true;
  F most = zero(), least = set1(1.0f);
  for (int64_t u = 0; u < units; u += kWidth) {
    const F v = zeros_as_one(magnitude(load_some(out + u, units - u)));
    most = max(most, v);
    least = min(least, v);
  }
  return highest(most) <= kLargestScale && lowest(least) >= kSmallestScale;
}

// -- x ----------------------------------------------------------------------------------------

// Rows of quantized x: codes as int8 (zeros to the padded length) and their scales.
inline bool pack_codes(const Weight& x, int64_t first, int64_t last, const Codes8& to) {
  [[maybe_unused]] const FlushSubnormals mode;
  bool fine = true;
  float* const scratch = new float[static_cast<size_t>(2 * x.grid_length + to.units + 128)];
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
  delete[] scratch;
  return fine;
}

// -- few rows ---------------------------------------------------------------------------------

// x laid out for dot8, a pair of rows after the other (or one row): per step of kStep8 codes, row by
// row, the codes (as the instruction set wants them), and minus the sums of each lane's codes, which are multiplied by the weight's bias (lane by
// lane, so that what cancels does so in integers).
inline void pack_steps(const Codes8& x, int64_t rows, const Weight8& w, const Steps& to) {
  const int64_t stride = to.steps * (kStep8 / kUnit) + 16;  // of the scales of a row
  for (int64_t m = 0; m < rows; ++m) {
    std::memcpy(to.scales + m * stride, x.scales + m * x.units, 4 * static_cast<size_t>(x.units));
    for (int64_t u = x.units; u < stride; ++u) to.scales[m * stride + u] = 0.0f;
  }
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t step = 0; step < to.steps; ++step) {
      const int64_t at = to.rows == 1 ? step : (m / 2 * to.steps + step) * 2 + m % 2;
      const int8_t* const codes = x.codes + m * x.padded + step * kStep8;
      put_step(codes, to.codes + at * kStepBytes);
      for (int lane = 0; lane < kWidth; ++lane) {
        int32_t total = 0;
        for (int i = 0; i < kStep8 / kWidth; ++i) total += codes[step_lane(lane, i)];
        to.sums[at * kWidth + lane] =
            static_cast<int16_t>(w.has_zero_point || w.bias ? -total : 0);
      }
    }
}

// One step against kRows rows of x. scales: of each row's units, times the line's. zeros: the units'
// zero points, where there are any.
template <int kRows, bool kZero, class B>
PQ_INLINE void dot8_at(const B& fields, int64_t step, const float* scales, int64_t stride,
                       const float* zeros, int bias_bits, const Steps& x, F (&acc)[kRows]) {
  I zero_points{};
  if constexpr (kZero) zero_points = to_int(lane_scales(zeros + step * (kStep8 / kUnit)));
#pragma GCC unroll 4
  for (int m = 0; m < kRows; ++m) {
    const int64_t at = step * kRows + m;
    I start = load_short(x.sums + at * kWidth);
    start = kZero ? mul_int(start, zero_points) : shifted(start, bias_bits);
    const F total = to_float(dot8_step(start, fields, x.codes + at * kStepBytes));
    acc[m] = fma(total, lane_scales(scales + m * stride + step * (kStep8 / kUnit)), acc[m]);
  }
}

// The steps that begin inside a line and may end beyond it.
template <int kRows, bool kZero, class Bytes>
__attribute__((noinline)) void dot8_rest(const Bytes& bytes, const uint8_t* p, int64_t line_codes,
                                         int64_t step, const float* scales, int64_t stride,
                                         const float* zeros, int bias_bits, const Steps& x,
                                         F (&acc)[kRows]) {
  for (; step < x.steps; ++step)
    dot8_at<kRows, kZero>(bytes.part(p + step * bytes.step, line_codes - step * bytes.step), step,
                          scales, stride, zeros, bias_bits, x, acc);
}

// A line: whole pairs of steps, with everything in registers, then the rest.
template <int kRows, bool kZero, class Bytes>
PQ_INLINE void dot8_line(const Bytes bytes, const uint8_t* p, int64_t line_codes,
                         const float* scales, int64_t stride, const float* zeros, int bias_bits,
                         const Steps x, F (&sums)[kRows]) {
  const int64_t pairs = min64(line_codes / bytes.step, x.steps) / 2;
  F even[kRows], odd[kRows];
  for (auto& sum : even) sum = zero();
  for (auto& sum : odd) sum = zero();
  const uint8_t* at = p;
  for (int64_t i = 0; i < pairs; ++i, at += 2 * bytes.step) {
    prefetch(at + 1024);
    dot8_at<kRows, kZero>(bytes(at), 2 * i, scales, stride, zeros, bias_bits, x, even);
    dot8_at<kRows, kZero>(bytes(at + bytes.step), 2 * i + 1, scales, stride, zeros, bias_bits, x,
                           odd);
  }
  for (int m = 0; m < kRows; ++m) sums[m] = add(even[m], odd[m]);
  if (2 * pairs < x.steps)
    dot8_rest<kRows, kZero>(bytes, p, line_codes, 2 * pairs, scales, stride, zeros, bias_bits, x,
                             sums);
}

template <int kRows, bool kZero, class Bytes>
inline bool dot8_lines(const Weight& w, const Weight8& kind, const Steps& x, int64_t rows,
                       int64_t first_line, int64_t first, int64_t last, const Output& y) {
  [[maybe_unused]] const FlushSubnormals mode;
  const Bytes bytes(kind);
  const int64_t units = x.steps * (kStep8 / kUnit), stride = units + 16;
  const int bias_bits = kind.bias ? __builtin_ctz(static_cast<unsigned>(kind.bias)) : 0;
  const int64_t line_codes = (w.length * w.bits + 7) / 8;
  float* const products = new float[static_cast<size_t>((kRows + 2) * stride + w.grid_length + 128)];
  float *const scales = products + kRows * stride, *const zeros = scales + stride + 16;
  float* const scratch = zeros + stride + 16;
  bool fine = true;
  for (int64_t n = first; n < last && fine; ++n) {
    const int64_t line = first_line + n, row = w.grid_row(line);
    fine = unit_scales(w, row, units, scratch, scales);
    if constexpr (kZero) {
      Weight by_zero = w;
      by_zero.scale = w.offset;
      unit_scales(by_zero, row, units, scratch, zeros);
    }
    for (int64_t u = 0; u < units; u += kWidth) {
      const F s = load(scales + u);
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m)
        store(products + m * stride + u, mul(s, load(x.scales + m * stride + u)));
    }
    F acc[kRows];
    const uint8_t* const p = w.data + line * w.line_bytes;
    dot8_line<kRows, kZero>(bytes, p, line_codes, products, stride, zeros, bias_bits, x, acc);
    for (int m = 0; m < kRows && m < rows; ++m)
      write_sum(y, m * y.row_stride + n, sum(acc[m]) * kind.factor);
  }
  delete[] products;
  return fine;
}

template <class Bytes>
inline bool dot8_of(const Weight& w, const Weight8& kind, const Steps& x, int64_t rows,
                    int64_t first_line, int64_t first, int64_t last, const Output& y) {
  const auto by = [&](auto has_zero) PQ_INLINE_LAMBDA {
    constexpr bool kZero = decltype(has_zero)::value;
    if (rows == 1)
      return dot8_lines<1, kZero, Bytes>(w, kind, x, rows, first_line, first, last, y);
    // Two rows at a time, whose codes stay in the first cache; the lines stay in the second.
    constexpr int64_t kLines = 16;
    const int64_t item = y.type == Float::kF32 ? 4 : 2;
    const int64_t stride = x.steps * (kStep8 / kUnit) + 16;
    for (int64_t n = first; n < last; n += kLines)
      for (int64_t m = 0; m < rows; m += 2) {
        const int64_t before = m * x.steps;
        const Steps pair{x.codes + before * kStepBytes, x.sums + before * kWidth,
                         x.scales + m * stride, x.steps, 2};
        const Output to{static_cast<char*>(y.data) + m * y.row_stride * item, y.type, y.row_stride};
        if (!dot8_lines<2, kZero, Bytes>(w, kind, pair, rows - m, first_line, n,
                                         min64(last, n + kLines), to))
          return false;
      }
    return true;
  };
  return kind.has_zero_point ? by(Constant<1>()) : by(Constant<0>());
}

inline bool dot8(const Weight& w, const Weight8& kind, const Steps& x, int64_t rows,
                 int64_t first_line, int64_t first, int64_t last, const Output& y) {
  const auto run = kind.bits == 4 && kind.table ? dot8_of<Bytes8<4, true>>
                   : kind.bits == 4             ? dot8_of<Bytes8<4, false>>
                   : kind.bits == 8 && !kind.table ? dot8_of<Bytes8<8, false>>
                                                : dot8_of<Bytes8<0, true>>;
  return run(w, kind, x, rows, first_line, first, last, y);
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
  const Bytes8<0, true> bytes(kind);
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
        for (int64_t at = 0; at < depth; at += kStep8, p += bytes.step) {
          const bool is_inside = p + bytes.step <= line + line_codes;
          const I fields = is_inside ? bytes(p) : bytes.part(p, line + line_codes - p);
          _mm512_storeu_si512(codes + i * kStride8 + at, fields);
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
