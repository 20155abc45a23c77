// Products of two quantized operands with integer codes: exact int32 sums of 32 products, each
// multiplied by its two scales and added up in float32.
//
// A weight's codes enter as bytes; a line is cut into units of 32, whose scales are one number each.
// `dot8` takes few rows of x and reads memory as it lies, one line after the other; `panel8` takes
// many and decodes a panel; what lies between is in turned-inl.h. An entry of a table may be several bytes, each with a sum of its own.
#pragma once

namespace pq::PQ_TARGET {

constexpr int kUnit = 32;
// Scales in this range: their products are float32 numbers, and so are those with a unit's sum.
// Other products are left to float32.
constexpr float kSmallestScale = 0x1p-60f, kLargestScale = 0x1p60f;

// Scales of a line, one per unit of 32, filled up with zeros; false where one is out of range.
inline bool unit_scales(const Weight& w, int64_t row, int64_t units, float* scratch, float* out) {
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
  const F low = set1(kSmallestScale), high = set1(kLargestScale);
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
  if constexpr (kWidth == 16) {  // elsewhere lookups of so many bytes are no faster than float32
    if (kind.bits == 4 && kind.planes == 3) return body(Bytes8<4, 3>(kind));
    if (kind.bits == 4 && kind.planes == 2) return body(Bytes8<4, 2>(kind));
  }
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

// Measured on Zen 5, where many rows' ways (of AVX-512) or float32 overtake.
inline Step8 step8(const Weight8& kind) {
  return with_bytes8(kind, [&](const auto& bytes) {
    using B = std::decay_t<decltype(bytes)>;
    constexpr bool kIsWide = kWidth == 16, kIsNarrow = B::kParts > 1;
    const int narrow = kIsNarrow ? 32 : 12, rows = kind.planes > 1 ? 0 : narrow;
    const int turned = kind.planes > 1 ? 2 : 6;  // see turned-inl.h
    const int wide = B::kParts == 2 && !kind.has_zero_point ? turned : 8;
    return Step8{kStepCodes<B>, kRowBytes<B>, kIsWide ? wide : rows};
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
  const I totals = B::dot(set1_int(0), B::ones(), B::row(to));
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

// How dot8 goes along lines and rows. scales: of each line and in it each row's units, `stride` apart.
// zeros: each line's zero points, where there are any.
struct Dot8 {
  const uint8_t *p, *x;
  const float *scales, *zeros, *powers;
  int64_t apart, stride;  // of lines, in bytes, and of scales
};

// One step of kLines lines against kRows rows of x.
template <int kLines, int kRows, bool kZero, class B>
PQ_INLINE void dot8_at(const B& bytes, const typename B::Codes (&codes)[kLines], const Dot8& at,
                       F (&sums)[kLines][kRows]) {
  constexpr int kLanes = 8 / B::kParts;
  typename B::Codes tables[kLines][B::kTables];
  I zero_points[kLines]{};
#pragma GCC unroll 2
  for (int l = 0; l < kLines; ++l) {
#pragma GCC unroll 4
    for (int t = 0; t < B::kTables; ++t) tables[l][t] = bytes.mapped(codes[l], t);
    if constexpr (kZero) zero_points[l] = to_int(lane_scales<kLanes>(at.zeros + l * at.stride));
  }
#pragma GCC unroll 4
  for (int m = 0; m < kRows; ++m) {
    const uint8_t* const x = at.x + m * kRowBytes<B>;
    const auto row = B::row(x);
    const I start = held(load_int(reinterpret_cast<const int32_t*>(x + B::kParts * B::kPartBytes)));
#pragma GCC unroll 2
    for (int l = 0; l < kLines; ++l) {
      const I begin = kZero ? mul_int(start, zero_points[l]) : start;
      F total = to_float(B::dot(begin, tables[l][0], row));
#pragma GCC unroll 4
      for (int t = 1; t < B::kTables; ++t)
        total = fma(to_float(B::dot(begin, tables[l][t], row)), set1(at.powers[t]), total);
      const float* const scales = at.scales + (l * kRows + m) * at.stride;
      sums[l][m] = fma(total, lane_scales<kLanes>(scales), sums[l][m]);
    }
  }
}

// Lines: whole steps, with everything in registers, then those that may end beyond them.
template <int kLines, int kRows, bool kZero, class B>
PQ_INLINE void dot8_line(const B bytes, int64_t line_codes, int64_t steps, Dot8 at,
                         F (&sums)[kLines][kRows]) {
  constexpr int kUnits = kStepCodes<B> / kUnit;
  // Few sums are kept twice, so that one need not wait for the other.
  constexpr int kTwice = kRows < 4 ? 2 : 1;
  const int64_t whole = min64(line_codes / bytes.step, steps) / kTwice * kTwice;
  typename B::Codes codes[kLines];
  const auto next = [&](F (&to)[kLines][kRows]) PQ_INLINE_LAMBDA {
    dot8_at<kLines, kRows, kZero>(bytes, codes, at, to);
    at.p += bytes.step;
    at.x += kRows * kRowBytes<B>;
    at.scales += kUnits;
    at.zeros += kUnits;
  };
  F others[kLines][kRows];
  for (auto& line : others)
    for (F& each : line) each = zero();
  for (int64_t i = 0; i < whole; i += kTwice) {
#pragma GCC unroll 2
    for (int twice = 0; twice < kTwice; ++twice) {
#pragma GCC unroll 2
      for (int l = 0; l < kLines; ++l) {
        prefetch(at.p + l * at.apart + kAhead);
        codes[l] = bytes(at.p + l * at.apart);
      }
      next(twice ? others : sums);
    }
  }
  for (int l = 0; kTwice == 2 && l < kLines; ++l)
    for (int m = 0; m < kRows; ++m) sums[l][m] = add(sums[l][m], others[l][m]);
  for (int64_t i = whole; i < steps; ++i) {
    for (int l = 0; l < kLines; ++l)
      codes[l] = bytes.part(at.p + l * at.apart, line_codes - i * bytes.step);
    next(sums);
  }
}

// Lines [first, last), kLines at a time as long as there are so many; the rest is left to the caller.
// memory: as dot8_groups makes it. Gives where it stopped, or -1 where a scale is too large.
template <int kLines, int kRows, bool kZero, class B>
inline int64_t dot8_lines(const Weight& w, const Weight8& kind, const B& bytes, const Steps& x,
                          int64_t rows, int64_t first_line, int64_t first, int64_t last,
                          float* products, const Output& y) {
  const int64_t stride = x.stride;
  const float* const x_scales = x.scales;
  float *const zeros = products + kLines * kRows * stride, *const scales = zeros + kLines * stride;
  float* const scratch = scales + stride;
  const int64_t line_codes = (w.length * w.bits + 7) / 8;
  const int64_t lines_ahead = 1 + kAhead / max64(1, w.line_bytes);
  for (; first + kLines <= last; first += kLines) {
    const int64_t line = first_line + first;
    for (int l = 0; l < kLines; ++l) {
      const int64_t row = w.grid_row(line + l);
      ask_ahead(w, w.scale, row, lines_ahead);
      const uint16_t* const halves = plain_halves(w, row, stride - 16);
      if (!halves && !unit_scales(w, row, stride - 16, scratch, scales)) return -1;
      if constexpr (kZero) {
        Weight by_zero = w;
        by_zero.scale = w.offset;
        ask_ahead(w, w.offset, row, lines_ahead);
        unit_scales(by_zero, row, stride - 16, scratch, zeros + l * stride);
      }
      float* const to = products + l * kRows * stride;
      for (int64_t u = 0; u < stride - 16; u += kWidth) {
        const F s = halves ? from_f16(halves + u) : load(scales + u);
#pragma GCC unroll 4
        for (int m = 0; m < kRows; ++m)
          store(to + m * stride + u, mul(s, load(x_scales + m * stride + u)));
      }
    }
    F sums[kLines][kRows];
    for (auto& each_line : sums)
      for (F& each : each_line) each = zero();
    dot8_line<kLines, kRows, kZero>(bytes, line_codes, x.steps,
                                    {w.data + line * w.line_bytes, x.codes, products, zeros,
                                     kind.powers, w.line_bytes, stride},
                                    sums);
#pragma GCC unroll 2
    for (int l = 0; l < kLines; ++l)
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m)
        if (m < rows) write_sum(y, m * y.row_stride + first + l, sum(sums[l][m]) * kind.factor);
  }
  return first;
}

// Four rows of x at a time, which stay in the first cache, against two lines, which share what is
// read of x; some lines stay in the second.
template <bool kZero, class B>
inline bool dot8_groups(const Weight& w, const Weight8& kind, const B& bytes, const Steps& x,
                        int64_t rows, int64_t first_line, int64_t first, int64_t last,
                        const Output& y) {
  const int64_t item = y.type == Float::kF32 ? 4 : 2;
  const int64_t lines = rows <= 4 ? max64(1, last - first) : 16;
  constexpr int kPair = kZero ? 1 : 2;
  const Floats memory = make_floats(11 * x.stride + w.grid_length + 128);
  for (int64_t n = first; n < last; n += lines)
    for (int64_t m = 0; m < rows; m += 4) {
      const int64_t some = min64(4, rows - m), end = min64(last, n + lines);
      const Steps part{x.codes + m * x.steps * kRowBytes<B>, x.scales + m * x.stride, x.steps, some,
                       x.stride};
      const Output to{static_cast<char*>(y.data) + m * y.row_stride * item, y.type, y.row_stride};
      const auto run = [&](int64_t from, auto lines, auto of_x) {
        constexpr int kLines = decltype(lines)::value, kRows = decltype(of_x)::value;
        return dot8_lines<kLines, kRows, kZero>(w, kind, bytes, part, some, first_line, from, end,
                                                memory.get(), to);
      };
      int64_t done = n;
      if (some == 1) {
        done = run(n, Constant<1>(), Constant<1>());
      } else if (some == 2) {
        done = run(n, Constant<1>(), Constant<2>());
      } else {
        done = run(n, Constant<kPair>(), Constant<4>());
        if (done >= 0 && done < end) done = run(done, Constant<1>(), Constant<4>());
      }
      if (done < 0) return false;
    }
  return true;
}

inline bool dot8(const Weight& w, const Weight8& kind, const Steps& x, int64_t rows,
                 int64_t first_line, int64_t first, int64_t last, const Output& y) {
  [[maybe_unused]] const FlushSubnormals mode;
  return with_bytes8(kind, [&](const auto& bytes) {
    using B = std::decay_t<decltype(bytes)>;
    if constexpr (!B::kIsTable) {
      if (kind.has_zero_point)
        return dot8_groups<true>(w, kind, bytes, x, rows, first_line, first, last, y);
    }
    return dot8_groups<false>(w, kind, bytes, x, rows, first_line, first, last, y);
  });
}

// -- many rows --------------------------------------------------------------------------------

#if defined(PQ_AVX512)

// Panels of few long lines: 96 of 512 codes, 2 KB apart, fell out of the first cache before their
// turn. What lies line by line does so at constant distances, or the loops would load pointers.
constexpr int kLines8 = 24, kDepth8 = 2048, kUnits8 = kDepth8 / kUnit + 16;
template <int kTables>
constexpr int kLineBytes8 = kTables * kDepth8 + 64;

// A panel of a weight: the bytes of its lines, step by step and in it part by part, as they lie in
// vectors. A unit is some bytes of every part: where it begins, and where its fours of bytes are.
template <class B>
PQ_INLINE constexpr int64_t unit_at(int64_t unit) {
  constexpr int64_t kUnits = 2 * B::kParts;  // of a step
  return unit / kUnits * kStepCodes<B> + unit % kUnits * (kUnit / B::kParts);
}
template <class B>
PQ_INLINE constexpr int64_t four_at(int four) {
  constexpr int kFours = 8 / B::kParts;  // of a part
  return four / kFours * B::kPartBytes + four % kFours * 4;
}

// x for panel8: panels of 32 rows: [unit][four][32 rows][4 codes], scales [unit][32 rows], and minus
// the sums of each unit's codes, times the weight's bias where that is the same everywhere.
inline void pack_panels8(const Codes8& x, const Weight8& kind, int64_t rows, int64_t first,
                         int64_t last, const Panels8& to) {
  const int32_t by = kind.has_zero_point ? -1 : -kind.bias;
  with_bytes8(kind, [&](const auto& bytes) {
    using B = std::decay_t<decltype(bytes)>;
    for (int64_t panel = first; panel < last; ++panel) {
      uint8_t* const codes = to.codes + panel * x.padded * 32;
      float* const scales = to.scales + panel * x.units * 32;
      int32_t* const sums = to.sums + panel * x.units * 32;
      const int64_t filled = rows - panel * 32 <= 16 ? 16 : 32;  // as many as tiles8 takes
      for (int64_t m = 0; m < filled; ++m) {
        const int64_t row = panel * 32 + m;
        const int8_t* const from = x.codes + row * x.padded;
        for (int64_t u = 0; u < x.units; ++u) {
          int8_t some[kUnit] = {};
          if (row < rows) split<B::kParts>(from + u * kUnit, kUnit, some, kUnit / B::kParts);
          int32_t total = 0;
          for (int8_t code : some) total += code;
          for (int k = 0; k < kUnit; k += 4) std::memcpy(codes + (u * kUnit + k) * 32 + m * 4, some + k, 4);
          scales[u * 32 + m] = row < rows ? x.scales[row * x.units + u] : 0.0f;
          sums[u * 32 + m] = total * by;
        }
      }
    }
    return 0;
  });
}

// Some lines of a weight as bytes, with the scales and zero points of their units.
struct Lines8 {
  const uint8_t* codes;         // a line: for every table kDepth8 bytes
  const float *scales, *zeros;  // zeros: null where the bias is the same everywhere
  const uint8_t* next;  // stored bytes that are wanted next, or null: asked for unit by unit
  int64_t next_stride, unit_bytes;

  PQ_INLINE void ask(int64_t unit, int rows) const {
    for (int64_t r = unit % 4; next && r < rows; r += 4)
      for (int64_t byte = 0; byte < 4 * unit_bytes; byte += 64)
        prefetch(next + r * next_stride + unit / 4 * 4 * unit_bytes + byte);
  }
};

// sums[r, 0..31] += the products of kRows lines and one panel, over `units` units.
template <class B, int kPlanes, int kRows, int kVectors>
inline void tile8(const Lines8 w, const float* powers, const uint8_t* x, const float* x_scales,
                  const int32_t* x_sums, int64_t units, float* sums, int64_t stride) {
  F acc[kRows][kVectors];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) acc[r][v] = load(sums + r * stride + v * 16);
  for (int64_t u = 0; u < units; ++u) {
    w.ask(u, kRows);
    F total[kRows][kVectors];
#pragma GCC unroll 3
    for (int plane = 0; plane < kPlanes; ++plane) {
      I part[kRows][kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const I start = load_int(x_sums + u * 32 + v * 16);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          part[r][v] = start;
          if (w.zeros) part[r][v] = mul_int(start, to_int(set1(w.zeros[r * kUnits8 + u])));
        }
      }
      const uint8_t* const codes = w.codes + plane * kDepth8 + unit_at<B>(u);
#pragma GCC unroll 8
      for (int four = 0; four < kUnit / 4; ++four) {
        I right[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
          right[v] = _mm512_loadu_si512(x + (u * (kUnit / 4) + four) * 128 + v * 64);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          int32_t bytes;
          std::memcpy(&bytes, codes + r * kLineBytes8<kPlanes> + four_at<B>(four), 4);
          const I left = set1_int(bytes);
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v)
            part[r][v] = _mm512_dpbusd_epi32(part[r][v], left, right[v]);
        }
      }
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r)
          total[r][v] = plane ? fma(to_float(part[r][v]), set1(powers[plane]), total[r][v])
                              : to_float(part[r][v]);
    }
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const F right = load(x_scales + u * 32 + v * 16);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r)
        acc[r][v] =
            fma(mul(total[r][v], set1(w.scales[r * kUnits8 + u])), right, acc[r][v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) store(sums + r * stride + v * 16, acc[r][v]);
}

template <class B, int kPlanes, int kVectors>
inline void tiles8(int64_t lines, Lines8 w, const float* powers, const uint8_t* x,
                   const float* x_scales, const int32_t* x_sums, int64_t units, float* sums,
                   int64_t stride) {
  constexpr int kTall = (kPlanes > 1 ? 8 : 12) / kVectors;  // divides kLines8
  for (int64_t r = 0; r < lines;) {
    const int64_t taken = lines - r >= kTall ? kTall : 1;
    if (taken == kTall)
      tile8<B, kPlanes, kTall, kVectors>(w, powers, x, x_scales, x_sums, units, sums + r * stride, stride);
    else
      tile8<B, kPlanes, 1, kVectors>(w, powers, x, x_scales, x_sums, units, sums + r * stride, stride);
    w.codes += taken * kLineBytes8<kPlanes>;
    if (w.next) w.next += taken * w.next_stride;
    w.scales += taken * kUnits8;
    if (w.zeros) w.zeros += taken * kUnits8;
    r += taken;
  }
}

template <int kBits, int kPlanes>
inline bool panels8(const Bytes8<kBits, kPlanes> bytes, const Weight& w, const Weight8& kind,
                    const Codes8& x, const Panels8& panels, int64_t rows, int64_t first_line,
                    int64_t first, int64_t last, float* scratch, const Output& y) {
  using B = Bytes8<kBits, kPlanes>;
  constexpr int kTables = B::kTables;
  const int64_t units = x.units, count = (rows + 31) / 32, stride = count * 32;
  const bool has_zeros = kind.has_zero_point;
  float *const sums = scratch, *const scales = sums + kLines8 * stride;
  float* const zeros = scales + kLines8 * units + 16;  // a line may be written too far
  float* const one_line = zeros + (has_zeros ? kLines8 * units + 16 : 0);
  float* const some_scales = one_line + w.grid_length + 64;
  float* const some_zeros = some_scales + kLines8 * kUnits8;
  uint8_t* const codes = reinterpret_cast<uint8_t*>(some_zeros + kLines8 * kUnits8);
  static_assert(kLines8 * (2 * kUnits8 + kLineBytes8<kTables> / 4) <= kPanel8Room);
  alignas(64) float out[kLines8];
  const int64_t line_codes = (w.length * w.bits + 7) / 8;
  const int64_t at_once = count > 1 ? kLines8 : kTables > 1 ? 8 : 12;
  for (int64_t n = first; n < last; n += at_once) {
    const int64_t lines = min64(at_once, last - n);
    const uint8_t* const lines_at = w.data + (first_line + n) * w.line_bytes;
    std::memset(sums, 0, 4 * static_cast<size_t>(lines * stride));
    for (int64_t i = 0; i < lines; ++i) {
      const int64_t row = w.grid_row(first_line + n + i);
      ask_ahead(w, w.scale, row, at_once);
      if (!unit_scales(w, row, units, one_line, scales + i * units)) return false;
      if (has_zeros) {
        Weight by_zero = w;
        by_zero.scale = w.offset;
        ask_ahead(w, w.offset, row, at_once);
        unit_scales(by_zero, row, units, one_line, zeros + i * units);
      }
    }
    for (int64_t k = 0; k < x.padded; k += kDepth8) {
      const int64_t depth = min64(kDepth8, x.padded - k), unit = k / kUnit;
      const size_t scale_bytes = static_cast<size_t>(depth / kUnit * 4);
      for (int64_t i = 0; i < lines; ++i) {
        std::memcpy(some_scales + i * kUnits8, scales + i * units + unit, scale_bytes);
        if (has_zeros) std::memcpy(some_zeros + i * kUnits8, zeros + i * units + unit, scale_bytes);
        const uint8_t* const line = lines_at + i * w.line_bytes;
        const uint8_t* p = line + k * w.bits / 8;
        for (int64_t at = 0; at < depth; at += kStepCodes<B>, p += bytes.step) {
          const bool is_inside = p + bytes.step <= line + line_codes;
          const auto fields = is_inside ? bytes(p) : bytes.part(p, line + line_codes - p);
#pragma GCC unroll 3
          for (int plane = 0; plane < kTables; ++plane) {
            const auto found = bytes.mapped(fields, plane);
            uint8_t* const to = codes + i * kLineBytes8<kTables> + plane * kDepth8 + at;
#pragma GCC unroll 4
            for (int j = 0; j < B::kParts; ++j) _mm512_storeu_si512(to + 64 * j, found.at[j]);
          }
        }
      }
      const uint8_t* const next = k + depth < x.padded ? lines_at + (k + depth) * w.bits / 8
                                                       : lines_at + at_once * w.line_bytes;
      Lines8 left{codes, some_scales,  has_zeros ? some_zeros : nullptr,
                  next,  w.line_bytes, kUnit * w.bits / 8};
      for (int64_t panel = 0; panel < count; ++panel) {
        const uint8_t* const right = panels.codes + panel * x.padded * 32 + k * 32;
        const int64_t at = (panel * units + unit) * 32;
        const auto run = rows - panel * 32 <= 16 ? tiles8<B, kTables, 1> : tiles8<B, kTables, 2>;
        run(lines, left, kind.powers, right, panels.scales + at, panels.sums + at, depth / kUnit,
            sums + panel * 32, stride);
        left.next = nullptr;
      }
    }
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t i = 0; i < lines; ++i) out[i] = sums[i * stride + m] * kind.factor;
      write_row(out, lines, y, m * y.row_stride + n);
    }
  }
  return true;
}

// scratch: sums of kLines8 lines, scales and zero points of their units, one line of scales, and
// kPanel8Room floats for a panel.
inline bool panel8(const Weight& w, const Weight8& kind, const Codes8& x, const Panels8& panels,
                   int64_t rows, int64_t first_line, int64_t first, int64_t last, float* scratch,
                   const Output& y) {
  [[maybe_unused]] const FlushSubnormals mode;
  return with_bytes8(kind, [&](const auto& bytes) {
    return panels8(bytes, w, kind, x, panels, rows, first_line, first, last, scratch, y);
  });
}

#endif

}  // namespace pq::PQ_TARGET
