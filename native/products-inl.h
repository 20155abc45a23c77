// Products of float activations and a stored weight, accumulated in float32.
//
// Two techniques. `dot`: few rows of x, lines along k: a line's codes are decoded in registers and
// multiplied at once, so that memory is read once, as it lies. `panel_*`: many rows, or lines along
// n: a panel of the weight is decoded into the cache and multiplied from there by one tile kernel.
#pragma once

namespace pq::PQ_TARGET {

constexpr int kDotRows = 4;
constexpr int kPanelLines = 96;   // lines of a panel: a multiple of every tile's height
constexpr int kPanelDepth = 256;  // of k
constexpr int kPanelColumns = 2 * kWidth;
constexpr int kChunk = 256;     // columns of a panel whose lines lie along n

// -- x ----------------------------------------------------------------------------------------

PQ_INLINE float float_at(const Activations& x, int64_t row, int64_t column) {
  const int64_t at = row * x.row_stride + column * x.column_stride;
  if (x.type == Float::kF32) return static_cast<const float*>(x.data)[at];
  const uint16_t bits = static_cast<const uint16_t*>(x.data)[at];
  uint16_t some[kWidth] = {bits};
  alignas(64) float out[kWidth];
  store(out, x.type == Float::kF16 ? from_f16(some) : from_bf16(some));
  return out[0];
}

inline void row_of(const Activations& x, int64_t row, int64_t start, int64_t count, float* out) {
  if (x.column_stride != 1) {
    for (int64_t i = 0; i < count; ++i) out[i] = float_at(x, row, start + i);
    return;
  }
  const int64_t at = row * x.row_stride + start;
  if (x.type == Float::kF32) {
    std::memcpy(out, static_cast<const float*>(x.data) + at, 4 * static_cast<size_t>(count));
    return;
  }
  const uint16_t* p = static_cast<const uint16_t*>(x.data) + at;
  const bool is_half = x.type == Float::kF16;
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth)
    store(out + i, is_half ? from_f16(p + i) : from_bf16(p + i));
  for (; i < count; ++i) out[i] = float_at(x, row, start + i);
}

inline void pack_rows(const Activations& x, int64_t first, int64_t last, const Packed& to) {
  for (int64_t row = first; row < last; ++row) {
    float* out = to.data + row * to.stride;
    const int64_t columns = row < x.rows ? x.columns : 0;
    if (columns) row_of(x, row, 0, columns, out);
    std::memset(out + columns, 0, 4 * static_cast<size_t>(to.stride - columns));
  }
}

inline void pack_panels(const Activations& x, int64_t first, int64_t last, int columns,
                        const Packed& to) {
  alignas(64) float row[kSegment];
  for (int64_t panel = first; panel < last; ++panel) {
    float* out = to.data + panel * to.stride;
    for (int64_t k = 0; k < x.columns; k += kSegment) {
      const int64_t count = min64(kSegment, x.columns - k);
      for (int m = 0; m < columns; ++m) {
        const int64_t from = panel * columns + m;
        if (from < x.rows)
          row_of(x, from, k, count, row);
        else
          std::memset(row, 0, sizeof row);
        for (int64_t i = 0; i < count; ++i) out[(k + i) * columns + m] = row[i];
      }
    }
  }
}

// -- few rows ---------------------------------------------------------------------------------

constexpr int64_t kLongestGrid = 2048;  // entries of a line of scales held at once

// The weights whose codes are multiplied in registers; others are decoded to a buffer first.
PQ_INLINE bool is_fused(const Weight& w) {
  const bool common = (w.kind == Kind::kTable16 && w.bits <= 4) || w.kind == Kind::kInteger ||
                      (w.kind == Kind::kMinifloat &&
                       (w.bits == 6 || (w.value_bits == 8 && w.offset_kind == OffsetKind::kNone)));
  return kWalks && vectors_per_scale(w) && common && w.grid_length <= kLongestGrid;
}

// kLines lines at once against kRows rows of x (lines share what is read of x).
template <int kLines, int kRows>
struct Sums {
  static constexpr int kEach = kLines * kRows == 1 ? 4 : kLines * kRows <= 4 ? 2 : 1;
  F at[kLines][kRows][kEach];
};

// Whole groups of kLines lines, with walkers; the rest is left to the caller.
template <int kLines, int kRows, class W>
PQ_INLINE void dot_groups(W (&walkers)[kLines], int64_t groups, const float* x, int64_t x_stride,
                          Sums<kLines, kRows>& sums) {
  constexpr int kEach = Sums<kLines, kRows>::kEach;
  for (int64_t g = 0; g < groups; ++g) {
#pragma GCC unroll 2
    for (int l = 0; l < kLines; ++l) {
      prefetch(walkers[l].p + kAhead);
      walkers[l].begin_group();
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      F v[kLines];
#pragma GCC unroll 2
      for (int l = 0; l < kLines; ++l) v[l] = walkers[l].next(j);
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m) {
        const F right = load(x + m * x_stride);
#pragma GCC unroll 2
        for (int l = 0; l < kLines; ++l)
          sums.at[l][m][j % kEach] = fma(v[l], right, sums.at[l][m][j % kEach]);
      }
      x += kWidth;
    }
  }
}

// Scales of the lines at hand, and room for what goes through a buffer.
struct DotScratch {
  static constexpr int64_t kRoom = 2 * (kLongestGrid + 64);
  alignas(64) float scale_room[kRoom], offset_room[kRoom], values[kSegment + 64];
  GridRows scales, offsets;
  explicit DotScratch(const Weight& w)
      : scales(w, w.scale, 0, w.grid_length, scale_room, kRoom),
        offsets(w, w.offset, 0, w.grid_length, offset_room, kRoom) {}
};

// Elements of a line from `at` on, by way of a buffer.
template <int kRows>
__attribute__((noinline)) void dot_rest(const Weight& w, int64_t line, int64_t at, const Packed& x, float* values,
                        F (&sums)[kRows]) {
  for (; at < w.length; at += kSegment) {
    const int64_t count = min64(kSegment, w.length - at);
    decode_segment(w, line, at, count, values);
    const int64_t rest = count % kWidth;
    if (rest) store(values + count - rest, keep(load(values + count - rest), static_cast<int>(rest)));
    for (int64_t i = 0; i < count; i += kWidth) {
      const F v = load(values + i);
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m) sums[m] = fma(v, load(x.data + m * x.stride + at + i), sums[m]);
    }
  }
}

PQ_INLINE void write_sum(const Output& y, int64_t at, float total) {
  uint16_t narrow_sum[kWidth];
  if (y.type == Float::kF32) {
    static_cast<float*>(y.data)[at] = total;
  } else {
    y.type == Float::kF16 ? to_f16(narrow_sum, set1(total)) : to_bf16(narrow_sum, set1(total));
    static_cast<uint16_t*>(y.data)[at] = narrow_sum[0];
  }
}

template <int kLines, int kRows, class At>
PQ_INLINE void dot_lines(const Weight& w, const At& walker_at, const Packed& x, int64_t rows,
                         int64_t first_line, int64_t n, DotScratch& scratch, const Output& y) {
  Sums<kLines, kRows> sums;
  for (auto& line : sums.at)
    for (auto& row : line)
      for (auto& sum : row) sum = zero();
  const int64_t line = first_line + n, row = w.grid_row(line);
  const int64_t last_row = w.grid_row(line + kLines - 1);
  scratch.scales.need(row, last_row - row + 1);
  if (w.offset_kind != OffsetKind::kNone) scratch.offsets.need(row, last_row - row + 1);
  bool walks = can_walk(w, row, 0, w.grid_length, scratch.scales.at(row));
  if (last_row != row)
    walks = walks && can_walk(w, last_row, 0, w.grid_length, scratch.scales.at(last_row));
  // The last bytes of all are left to the buffer, which may be read beyond its end.
  const int64_t bytes =
      static_cast<int64_t>(w.size_bytes) - (line + kLines - 1) * w.line_bytes - kOverread;
  const int64_t readable = min64(w.length, max64(bytes, 0) * 8 / w.bits);
  const int64_t groups = walks ? readable / kGroup : 0;
  const auto walker = [&](int l) PQ_INLINE_LAMBDA {
    const int64_t its_row = l ? last_row : row;
    return walker_at(w.data + (line + l) * w.line_bytes, scratch.scales.at(its_row),
                     scratch.offsets.at(its_row));
  };
  if constexpr (kLines == 1) {
    decltype(walker(0)) walkers[1] = {walker(0)};
    dot_groups(walkers, groups, x.data, x.stride, sums);
  } else {
    decltype(walker(0)) walkers[2] = {walker(0), walker(1)};
    dot_groups(walkers, groups, x.data, x.stride, sums);
  }
  for (int l = 0; l < kLines; ++l) {
    F all[kRows];
    for (int m = 0; m < kRows; ++m) {
      all[m] = sums.at[l][m][0];
      for (int j = 1; j < Sums<kLines, kRows>::kEach; ++j) all[m] = add(all[m], sums.at[l][m][j]);
    }
    dot_rest(w, line + l, groups * kGroup, x, scratch.values, all);
    for (int m = 0; m < kRows && m < rows; ++m) write_sum(y, m * y.row_stride + n + l, sum(all[m]));
  }
}

template <int kRows>
__attribute__((noinline)) void dot_line_by_buffer(const Weight& w, int64_t first_line, int64_t n,
                                                  const Packed& x, int64_t rows, float* values,
                                                  const Output& y) {
  F sums[kRows];
  for (auto& sum : sums) sum = zero();
  dot_rest(w, first_line + n, 0, x, values, sums);
  for (int m = 0; m < kRows && m < rows; ++m) write_sum(y, m * y.row_stride + n, sum(sums[m]));
}

template <int kLines, int kRows>
inline void dot_of(const Weight& w, const Packed& x, int64_t rows, int64_t first_line,
                   int64_t first, int64_t last, const Output& y) {
  DotScratch scratch(w);
  if (!is_fused(w)) {
    for (int64_t n = first; n < last; ++n)
      dot_line_by_buffer<kRows>(w, first_line, n, x, rows, scratch.values, y);
    return;
  }
  const auto lines = [&](const auto& fetch, const auto& number) PQ_INLINE_LAMBDA {
    with_walker(w, fetch, number, 0, [&](const auto& walker_at) PQ_INLINE_LAMBDA {
      int64_t n = first;
      for (; n + kLines <= last; n += kLines)
        dot_lines<kLines, kRows>(w, walker_at, x, rows, first_line, n, scratch, y);
      for (; n < last; ++n) dot_line_by_buffer<kRows>(w, first_line, n, x, rows, scratch.values, y);
    });
  };
  with_decoder(w, [&](const auto& fetch, const auto& number, auto is_common) PQ_INLINE_LAMBDA {
    if constexpr (decltype(is_common)::value) lines(fetch, number);
  });
}

inline void dot(const Weight& w, const Packed& x, int64_t rows, int64_t first_line, int64_t first,
                int64_t last, const Output& y) {
  [[maybe_unused]] const FlushSubnormals mode;
  if (rows == 1)
    dot_of<1, 1>(w, x, rows, first_line, first, last, y);
  else
    dot_of<2, kDotRows>(w, x, rows, first_line, first, last, y);
}

// -- few rows, lines along n ------------------------------------------------------------------

// Scales of the same few blocks of line after line, without a call where they are plain numbers.
struct FewScales {
  const Grid& grid;
  const int64_t grid_length, start, count;
  const int64_t item;     // bytes
  int64_t safe_rows = 0;  // rows that are quick, and whose vector lies inside the grid
  PQ_INLINE FewScales(const Weight& w, const Grid& grid, int64_t start, int64_t count)
      : grid(grid), grid_length(w.grid_length), start(start), count(count), item(item_of(grid)) {
    const int64_t most = grid.number == Number::kUE8M0 ? 8 : kWidth;
    if (are_plain(w, grid) && count <= most)
      safe_rows = (w.grid_rows * grid_length - start - 16) / grid_length;
  }
  PQ_INLINE static bool are_plain(const Weight& w, const Grid& grid) {
    const bool is_plain = grid.number == Number::kF16 || grid.number == Number::kF32 ||
                          grid.number == Number::kU8 || grid.number == Number::kUE8M0;
    return is_plain && !grid.tensor_scale && w.leading == 1 && w.lead_block[0] == 1;
  }
  // Of a safe row: false where a line must not be walked along (see can_walk).
  PQ_INLINE bool quick(int64_t row, bool must_be_small, float* out) const {
    const int64_t at = row * grid_length + start;
    prefetch(grid.data + (at + kFewLines * grid_length) * item);
    if (grid.number == Number::kF16) {
      store(out, mul(from_f16(reinterpret_cast<const uint16_t*>(grid.data) + at), set1(1.0f)));
      return true;
    }
    if (grid.number == Number::kU8) {
      store(out, from_u8(grid.data + at));
      return true;
    }
    if (grid.number == Number::kF32) {
      store(out, mul(load(reinterpret_cast<const float*>(grid.data) + at), set1(1.0f)));
    } else {
      store(out, from_ue8m0(grid.data + at));
      uint64_t bytes;  // a zero among the first `count`?
      std::memcpy(&bytes, grid.data + at, 8);
      const uint64_t zeros = (bytes - 0x0101010101010101u) & ~bytes & 0x8080808080808080u;
      if (zeros << (64 - 8 * count)) return false;
    }
    bool small = true;
    if (must_be_small)
      for (int64_t i = 0; i < count; ++i) small &= out[i] < 0x1p100f && out[i] > -0x1p100f;
    return small;
  }
};

// Entries [start, start + count) of the grid's rows for some lines, as float32 numbers of rows that are
// as long. Rows of a grid that is quantized itself are decoded together.
inline Grid plain_grid(const Weight& w, const Grid& grid, int64_t line, int64_t lines, int64_t start,
                       int64_t count, float* memory) {
  const int64_t length = w.grid_length, before = start % 8;
  const bool own_rows = w.leading == 1 && w.lead_block[0] == 1;
  if (grid.number == Number::kNested && own_rows && count + before <= kSegment) {
    decode_lines(*grid.nested, line, lines, start - before, count + before, memory + start - before,
                 length);
  } else {
    for (int64_t i = 0; i < lines; ++i)
      grid_line(grid, length, w.grid_row(line + i), start, count, memory + i * length + start);
  }
  return {Number::kF32, reinterpret_cast<const uint8_t*>(memory), few_grid(w), nullptr, nullptr};
}

// Some lines as a weight of their own, with plain scales and offsets for columns [first, last).
inline Weight plain_lines(const Weight& w, int64_t line, int64_t lines, int64_t first, int64_t last,
                          float* memory) {
  const int64_t start = first / w.block, count = (last - 1) / w.block - start + 1;
  Weight made = w;
  made.data += line * w.line_bytes;
  made.size_bytes -= static_cast<size_t>(line * w.line_bytes);
  made.lines = lines;
  made.leading = 1;
  made.lead_block[0] = 1;
  made.grid_rows = few_grid(w) / w.grid_length;
  made.scale = plain_grid(w, w.scale, line, lines, start, count, memory);
  if (w.offset_kind != OffsetKind::kNone)
    made.offset = plain_grid(w, w.offset, line, lines, start, count, memory + few_grid(w));
  return made;
}

// sums[m * stride, ...] += columns [n, n + kVectors * kWidth) of `depth` lines, for kRows rows; x
// begins with them. The sums stay in registers.
template <int kRows, int kVectors, class At>
PQ_INLINE void columns_chunk(const Weight& w, const At& walker_at, const Packed x,
                             int64_t first_line, int64_t depth, int64_t n, float* sums,
                             int64_t stride) {
  constexpr int64_t kColumns = kVectors * kWidth;
  alignas(64) float scale[kColumns + 64], offset[kColumns + 64], values[kColumns + 64];
  const int64_t g0 = n / w.block, blocks = (n + kColumns - 1) / w.block - g0 + 1;
  const int64_t bytes = kColumns * w.bits / 8, line_bytes = w.line_bytes;
  const bool has_offset = w.offset_kind != OffsetKind::kNone;
  const bool must_be_small = folds_power(w);
  const FewScales scales(w, w.scale, g0, blocks), offsets(w, w.offset, g0, blocks);
  const uint8_t* p = w.data + first_line * line_bytes + n * w.bits / 8;
  const uint8_t* const last_safe = w.data + w.size_bytes - bytes - kOverread;
  F acc[kRows][kVectors];
#pragma GCC unroll 4
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) acc[m][v] = load(sums + m * stride + v * kWidth);
  const auto walk = [&](int64_t k) PQ_INLINE_LAMBDA {
#pragma GCC unroll 4
    for (int64_t byte = 0; byte < kColumns; byte += 64)
      if (byte < bytes) prefetch(p + kFewLines * line_bytes + byte);
    prefetch(p + kFewLines * line_bytes + bytes - 1);
    F left[kRows];
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) left[m] = set1(x.data[m * x.stride + k]);
    auto walker = walker_at(p, scale, offset);
#pragma GCC unroll 4
    for (int group = 0; group < kVectors / 4; ++group) {
      walker.begin_group();
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const F v = walker.next(j);
#pragma GCC unroll 4
        for (int m = 0; m < kRows; ++m)
          acc[m][group * 4 + j] = fma(v, left[m], acc[m][group * 4 + j]);
      }
    }
  };
  int64_t safe = p <= last_safe ? (last_safe - p) / line_bytes + 1 : 0;
  safe = min64(min64(safe, depth), scales.safe_rows - first_line);
  if (has_offset) safe = min64(safe, offsets.safe_rows - first_line);
  int64_t k = 0;
  for (; k < safe; ++k, p += line_bytes) {  // without a call, so that the sums stay in registers
    if (!scales.quick(first_line + k, must_be_small, scale)) break;
    if (has_offset) offsets.quick(first_line + k, false, offset);
    walk(k);
  }
  for (; k < depth; ++k) {
    decode_segment(w, first_line + k, n, kColumns, values);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m)
        acc[m][v] = fma(load(values + v * kWidth), set1(x.data[m * x.stride + k]), acc[m][v]);
  }
#pragma GCC unroll 4
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) store(sums + m * stride + v * kWidth, acc[m][v]);
}

template <int kRows, int kVectors>
inline void columns_of(const Weight& w, const Packed& x, int64_t rows, int64_t first_line,
                       int64_t depth, int64_t first, int64_t last, float* sums, const Output& y) {
  const int64_t stride = last - first;
  Weight some_lines;
  float* const grids = sums + kRows * stride;
  const bool are_plain = FewScales::are_plain(w, w.scale) &&
                         (w.offset_kind == OffsetKind::kNone || FewScales::are_plain(w, w.offset));
  std::memset(sums, 0, 4 * static_cast<size_t>(kRows * stride));
  with_decoder(w, [&](const auto& fetch, const auto& number, auto is_common) PQ_INLINE_LAMBDA {
    if constexpr (decltype(is_common)::value) {
      for (int64_t k = 0; k < depth; k += kFewLines) {
        const int64_t some = min64(kFewLines, depth - k);
        const Packed from{x.data + k, x.stride};
        const int64_t line = are_plain ? first_line + k : 0;
        if (!are_plain) some_lines = plain_lines(w, first_line + k, some, first, last, grids);
        const Weight& here = are_plain ? w : some_lines;
        for (int64_t n = first; n < last; n += kVectors * kWidth)
          with_walker(w, fetch, number, n, [&](const auto& walker_at) PQ_INLINE_LAMBDA {
            columns_chunk<kRows, kVectors>(here, walker_at, from, line, some, n,
                                           sums + n - first, stride);
          });
      }
    }
  });
  for (int64_t m = 0; m < rows; ++m) write_row(sums + m * stride, stride, y, m * y.row_stride + first);
}

// How many columns from `first` on `columns_few` takes for up to 4 rows: whole chunks.
constexpr int kFewVectors = kWidth == 16 ? 16 : 8;

// y[m, n] for columns of whole chunks, few rows and lines along n; returns where it stopped. sums:
// four rows of them.
inline int64_t columns_few(const Weight& w, const Packed& x, int64_t rows, int64_t first_line,
                           int64_t depth, int64_t first, int64_t last, float* sums,
                           const Output& y) {
  if (!is_fused(w) || rows > 4) return first;
  if (w.scale.number == Number::kUE8M0 && !FewScales::are_plain(w, w.scale)) return first;
  const int64_t vectors = rows == 1 ? kFewVectors : kFewVectors / 4 < 4 ? 4 : kFewVectors / 4;
  const int64_t whole = first + (last - first) / (vectors * kWidth) * (vectors * kWidth);
  if (rows == 1)
    columns_of<1, kFewVectors>(w, x, rows, first_line, depth, first, whole, sums, y);
  else
    columns_of<4, 4>(w, x, rows, first_line, depth, first, whole, sums, y);
  return whole;
}

// -- many rows --------------------------------------------------------------------------------

// c[r, :] += sum over k of a[r, k] * b[k, :], for kRows rows and kVectors vectors.
template <int kRows, int kVectors>
PQ_INLINE void tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                    int64_t depth, float* c, int64_t c_stride) {
  F acc[kRows][kVectors];
#pragma GCC unroll 24
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) acc[r][v] = load(c + r * c_stride + v * kWidth);
  for (int64_t k = 0; k < depth; ++k) {
    F right[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) right[v] = load(b + k * b_stride + v * kWidth);
#pragma GCC unroll 24
    for (int r = 0; r < kRows; ++r) {
      const F left = set1(a[r * a_stride + k]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(left, right[v], acc[r][v]);
    }
  }
#pragma GCC unroll 24
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) store(c + r * c_stride + v * kWidth, acc[r][v]);
}

// Bytes of lines that are wanted next: asked for while tiles are computed, a few lines at a time.
struct Ahead {
  const uint8_t* p = nullptr;
  int64_t stride = 0, bytes = 0;
  PQ_INLINE void operator()(int64_t first, int64_t last) const {
    for (int64_t line = first; line < last; ++line)
      for (int64_t byte = 0; byte < bytes; byte += 64) prefetch(p + line * stride + byte);
  }
};

// All rows of a by one panel of b: tiles of kTileRows rows, then what is left.
template <int kVectors>
inline void tiles(int64_t rows, const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                  int64_t depth, float* c, int64_t c_stride, const Ahead& ahead = {}) {
  constexpr int kRows = kVectors == 2 ? kTileRows : 12;
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) {
    ahead(r, r + kRows);
    tile<kRows, kVectors>(a + r * a_stride, a_stride, b, b_stride, depth, c + r * c_stride, c_stride);
  }
  for (; r + 4 <= rows; r += 4)
    tile<4, kVectors>(a + r * a_stride, a_stride, b, b_stride, depth, c + r * c_stride, c_stride);
  for (; r < rows; ++r)
    tile<1, kVectors>(a + r * a_stride, a_stride, b, b_stride, depth, c + r * c_stride, c_stride);
}

// scratch: kPanelLines * kPanelDepth values, then kPanelLines rows of all columns of x.
inline void panel_rows(const Weight& w, const Packed& x, int64_t rows, int columns,
                       int64_t first_line, int64_t first, int64_t last, float* scratch,
                       const Output& y) {
  [[maybe_unused]] const FlushSubnormals mode;
  const int64_t panels = (rows + columns - 1) / columns, stride = panels * columns;
  float* const sums = scratch + kPanelLines * (kPanelDepth + 16);
  alignas(64) float out[kPanelLines];
  for (int64_t n = first; n < last; n += kPanelLines) {
    const int64_t lines = min64(kPanelLines, last - n);
    std::memset(sums, 0, 4 * static_cast<size_t>(lines * stride));
    for (int64_t k = 0; k < w.length; k += kPanelDepth) {
      const int64_t depth = min64(kPanelDepth, w.length - k);
      decode_lines(w, first_line + n, lines, k, depth, scratch, kPanelDepth + 16);
      const int64_t next = min64(kPanelDepth, w.length - k - depth) * w.bits / 8;
      const uint8_t* const line = w.data + (first_line + n) * w.line_bytes;
      for (int64_t panel = 0; panel < panels; ++panel) {
        const float* b = x.data + panel * x.stride + k * columns;
        float* c = sums + panel * columns;
        const Ahead ahead{line + (k + depth) * w.bits / 8, w.line_bytes, panel == 0 ? next : 0};
        if (columns == kWidth)
          tiles<1>(lines, scratch, kPanelDepth + 16, b, columns, depth, c, stride, ahead);
        else
          tiles<2>(lines, scratch, kPanelDepth + 16, b, columns, depth, c, stride, ahead);
      }
    }
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t i = 0; i < lines; ++i) out[i] = sums[i * stride + m];
      write_row(out, lines, y, m * y.row_stride + n);
    }
  }
}

// scratch: kPanelDepth * kChunk values, then `rows` rows of kChunk sums; or 4 rows of all columns.
inline void panel_columns(const Weight& w, const Packed& x, int64_t rows, int64_t first_line,
                          int64_t depth, int64_t first, int64_t last, float* scratch,
                          const Output& y) {
  [[maybe_unused]] const FlushSubnormals mode;
  first = columns_few(w, x, rows, first_line, depth, first, last, scratch, y);
  float* const sums = scratch + kPanelDepth * kChunk;
  constexpr int64_t kLinesAtOnce = 8;
  alignas(64) float values[kLinesAtOnce * kChunk + 64];
  for (int64_t n = first; n < last; n += kChunk) {
    const int64_t columns = min64(kChunk, last - n);
    const int64_t panels = (columns + kPanelColumns - 1) / kPanelColumns;
    std::memset(sums, 0, 4 * static_cast<size_t>(rows * kChunk));
    for (int64_t k0 = 0; k0 < depth; k0 += kPanelDepth) {
      const int64_t count = min64(kPanelDepth, depth - k0);
      for (int64_t k = 0; k < count; k += kLinesAtOnce) {
        const int64_t lines = min64(kLinesAtOnce, count - k);
        for (int64_t i = 0; i < lines; ++i) {
          const uint8_t* next = w.data + (first_line + k0 + k + kLinesAtOnce + i) * w.line_bytes;
          for (int64_t byte = n * w.bits / 8; byte < (n + columns) * w.bits / 8; byte += 64)
            prefetch(next + byte);
        }
        decode_lines(w, first_line + k0 + k, lines, n, columns, values, kChunk);
        for (int64_t i = 0; i < lines; ++i)
          for (int64_t panel = 0; panel < panels; ++panel) {
            float* to = scratch + (panel * kPanelDepth + k + i) * kPanelColumns;
            const float* from = values + i * kChunk + panel * kPanelColumns;
            store(to, load(from));
            store(to + kWidth, load(from + kWidth));
          }
      }
      for (int64_t panel = 0; panel < panels; ++panel)
        tiles<2>(rows, x.data + k0, x.stride, scratch + panel * kPanelDepth * kPanelColumns,
                 kPanelColumns, count, sums + panel * kPanelColumns, kChunk);
    }
    for (int64_t m = 0; m < rows; ++m) write_row(sums + m * kChunk, columns, y, m * y.row_stride + n);
  }
}

}  // namespace pq::PQ_TARGET
