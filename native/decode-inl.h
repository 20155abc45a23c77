// From stored bytes to float32 numbers: lines of scales, and segments of lines of weights.
//
// Included once per instruction set, after its simd_*.h. Arithmetic is the contract's, step by step
// (no fused multiply-add): number, minus zero point, times scale, plus bias, subnormals to zero.
#pragma once

#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

namespace pq::PQ_TARGET {

#define PQ_INLINE inline __attribute__((always_inline))
#define PQ_INLINE_LAMBDA __attribute__((always_inline))

constexpr int kSegment = 512;      // elements decoded at a time
constexpr int kOverread = 32;      // bytes that a fetch may read beyond its codes
constexpr int64_t kAhead = 8192;   // bytes: one line after the other is read at 45 GB/s then, not 37
constexpr float kTiny = 1.17549435e-38f;

PQ_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
PQ_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// Floats that begin a cache line.
struct FreeFloats {
  void operator()(float* p) const { ::operator delete(p, std::align_val_t(64)); }
};
using Floats = std::unique_ptr<float, FreeFloats>;
inline Floats make_floats(int64_t count) {
  return Floats(static_cast<float*>(::operator new(4 * static_cast<size_t>(count), std::align_val_t(64))));
}

template <int n>
struct Constant {
  static constexpr int value = n;
};

inline void decode_segment(const Weight& w, int64_t line, int64_t start, int64_t count, float* out);
__attribute__((noinline)) void decode_lines(const Weight& w, int64_t first_line, int64_t lines,
                                            int64_t start, int64_t count, float* out,
                                            int64_t stride);

// Numbers of a stored type as float32 vectors, times `whole`. `left`: how many can be read from p on.
template <class T, class Convert>
PQ_INLINE void convert_numbers(const T* p, int64_t left, int64_t count, F whole, float* out,
                               const Convert& convert) {
  for (int64_t i = 0; i < count; i += kWidth) {
    if (i + kWidth <= left) {
      store(out + i, mul(convert(p + i), whole));
      continue;
    }
    T rest[kWidth] = {};  // the last numbers of all
    std::memcpy(rest, p + i, sizeof(T) * static_cast<size_t>(left - i));
    store(out + i, mul(convert(rest), whole));
  }
}

// Entries [start, start + count) of a row of a grid; writes up to kWidth - 1 floats beyond.
inline void grid_line(const Grid& grid, int64_t grid_length, int64_t row, int64_t start,
                      int64_t count, float* out) {
  const int64_t at = row * grid_length + start, left = grid.size - at;
  // Subnormals count as zero, also where nothing is multiplied: every number meets a product.
  const F whole = set1(grid.tensor_scale ? *grid.tensor_scale : 1.0f);
  const uint8_t* const bytes = grid.data + at;
  const uint16_t* const halves = reinterpret_cast<const uint16_t*>(grid.data) + at;
  switch (grid.number) {
    case Number::kF32:
      convert_numbers(reinterpret_cast<const float*>(grid.data) + at, left, count, whole, out, load);
      break;
    case Number::kF16:
      convert_numbers(halves, left, count, whole, out, from_f16);
      break;
    case Number::kBF16:
      convert_numbers(halves, left, count, whole, out, from_bf16);
      break;
    case Number::kU8:
      convert_numbers(bytes, left, count, whole, out, from_u8);
      break;
    case Number::kUE8M0:
      convert_numbers(bytes, left, count, whole, out, from_ue8m0);
      break;
    case Number::kE4M3: {
      const Mini e4m3(Minifloat{0x80, 0x7f, 8, 7, 256.0f, 0x7f});
      convert_numbers(bytes, left, count, whole, out,
                      [&](const uint8_t* p) PQ_INLINE_LAMBDA { return e4m3(Byte(8)(p)); });
      break;
    }
    case Number::kNested:  // the grid is a tensor of its own: the row is one of its lines
      for (int64_t i = 0; i < count; i += kSegment)
        decode_segment(*grid.nested, row, start + i, min64(kSegment, count - i), out + i);
      break;
  }
}

// Bytes of a number that is stored as one.
PQ_INLINE int64_t item_of(const Grid& grid) {
  return grid.number == Number::kF32 ? 4 : grid.number <= Number::kBF16 ? 2 : 1;
}

// Asks for the numbers of a line that will be wanted so many lines after this one.
PQ_INLINE void ask_ahead(const Weight& w, const Grid& grid, int64_t row, int64_t lines) {
  if (grid.number == Number::kNested) return;
  const int64_t bytes = w.grid_length * item_of(grid);
  const uint8_t* const p = grid.data + (row + lines) * bytes;
  for (int64_t byte = 0; byte < bytes; byte += 64) prefetch(p + byte);
}

// The same entries of row after row of a grid. Rows of a grid that is quantized itself are decoded
// several at a time.
class GridRows {
 public:
  // memory: room for two rows and as many more as it holds.
  GridRows(const Weight& w, const Grid& grid, int64_t start, int64_t count, float* memory,
           int64_t size)
      : grid_(grid), grid_length_(w.grid_length), start_(start), count_(count),
        stride_((count + 15) / 16 * 16 + 16), memory_(memory), most_(min64(8, size / stride_)) {}

  // The entries of rows [row, row + rows) are at(row), at(row + 1), ...; rows is 1 or 2.
  PQ_INLINE void need(int64_t row, int64_t rows) {
    if (grid_.number == Number::kNested && row >= first_ && row + rows <= first_ + held_) return;
    first_ = row;
    if (grid_.number == Number::kNested)
      decode_rows();
    else
      for (int64_t i = 0; i < rows; ++i)
        grid_line(grid_, grid_length_, row + i, start_, count_, memory_ + i * stride_);
  }
  PQ_INLINE const float* at(int64_t row) const { return memory_ + (row - first_) * stride_; }

 private:
  __attribute__((noinline)) void decode_rows() {
    held_ = min64(most_, grid_.nested->lines - first_);
    if (start_ % 8 == 0 && count_ <= kSegment) {
      decode_lines(*grid_.nested, first_, held_, start_, count_, memory_, stride_);
      return;
    }
    for (int64_t i = 0; i < held_; ++i)
      grid_line(grid_, grid_length_, first_ + i, start_, count_, memory_ + i * stride_);
  }

  const Grid& grid_;
  const int64_t grid_length_, start_, count_, stride_;
  float* const memory_;
  const int64_t most_;
  int64_t first_ = 0, held_ = 0;
};

// A pointer to the codes of a segment that may be read kOverread bytes too far.
PQ_INLINE const uint8_t* codes_at(const Weight& w, int64_t line, int64_t first_byte, int64_t bytes,
                                  uint8_t* copy) {
  const uint8_t* p = w.data + line * w.line_bytes + first_byte;
  if (static_cast<size_t>(p - w.data) + static_cast<size_t>(bytes) + kOverread <= w.size_bytes)
    return p;
  const int64_t left = min64(bytes, static_cast<int64_t>(w.size_bytes) - (p - w.data));
  std::memset(copy, 0, static_cast<size_t>(bytes + kOverread));
  std::memcpy(copy, p, static_cast<size_t>(left));
  return copy;
}

// Calls body with the fetch and number functors of the weight's codes, made once for many lines,
// and whether the pair is common enough for loops of its own.
template <class Body>
PQ_INLINE void with_decoder(const Weight& w, Body body) {
  using Common = Constant<kWalks>;
  using Rare = Constant<0>;
  const auto both = [&](const auto& number) PQ_INLINE_LAMBDA {
    if (w.bits == 8)
      body(Byte(8), number, Rare());
    else
      body(Large(w.bits), number, Rare());
  };
  if (w.kind == Kind::kTable16) {
    alignas(64) float entries[16];  // repeated, so that bits above the code do not matter
    for (int i = 0; i < 16; ++i) entries[i] = w.table[i & ((1 << w.value_bits) - 1)];
    if (w.bits == 8)
      body(Byte(8), Table16(entries), Rare());
    else
      body(Small(w.bits), Table16(entries), Common());
#if defined(PQ_AVX512)
  } else if (w.kind == Kind::kInteger && w.bits == w.value_bits && w.bits <= 6) {
    body(Large(w.bits), Looked::of_integers(w.bits, w.is_signed), Common());
  } else if (w.kind == Kind::kMinifloat && w.bits == 6) {
    body(Large(6), Looked::of_minifloats(w.minifloat), Common());
#else
  } else if (w.kind == Kind::kMinifloat && w.bits == 6) {
    body(Large(6), Mini(w.minifloat), Common());
#endif
  } else if (w.kind == Kind::kInteger) {
    const Integer number(w.value_bits, w.is_signed);
    if (w.bits == 8)
      body(Byte(8), number, Common());
    else
      body(Large(w.bits), number, Common());
  } else if (w.kind == Kind::kTable256) {
    both(Table256(w.table, w.value_bits));
  } else if (w.value_bits < 8) {
    body(Byte(8), Mini(w.minifloat), Rare());
  } else if (w.offset_kind == OffsetKind::kNone) {
    body(Word(), Float8(w.minifloat), Common());
  } else {
    body(Word(), Float8(w.minifloat), Rare());
  }
}

constexpr int kGroup = 4 * kWidth;  // elements of a step of a Walker

// What is found out about the codes of a step at once, where that is how they are decoded.
struct NoGroup {};
template <class N, class = void>
struct GroupOfNumber {
  using type = NoGroup;
};
template <class N>
struct GroupOfNumber<N, std::void_t<typename N::Group>> {
  using type = typename N::Group;
};
template <class N>
using GroupOf = typename GroupOfNumber<N>::type;

// Walks along a line whose blocks are whole vectors: the contract's value of every vector in turn.
// kPerScale vectors share a scale (4: as many groups of 4 as the block has).
template <int kPerScale, bool kOffset, class Fetch, class N>
struct Walker {
  // Some codes are looked at by groups. Where minifloats of a byte go through float16, their power of two goes
  // into the scale: exact, as long as no scale is huge.
  static constexpr bool kGroups = !std::is_same_v<GroupOf<N>, NoGroup>;
  static constexpr bool kFolds = std::is_same_v<N, Float8> && Float8::kFolds;
  const Fetch& fetch;
  const N& number;
  bool is_bias;
  const uint8_t* p;
  const float *scale, *offset;
  int64_t groups_per_block, left;  // groups left with the present scale
  F s, o;
  GroupOf<N> group;

  PQ_INLINE void load_scale() {
    s = set1(*scale++);
    if constexpr (kFolds) s = mul(s, number.power);
    if constexpr (kOffset) o = set1(*offset++);
  }
  PQ_INLINE void begin_group() {
    if constexpr (kGroups) group = number.group(p);
    if constexpr (kPerScale == 4) {
      if (left == 0) {
        load_scale();
        left = groups_per_block;
      }
      --left;
    }
  }
  PQ_INLINE F next(int j) {
    if constexpr (kPerScale < 4) {
      if (j % kPerScale == 0) load_scale();
    }
    F v;
    if constexpr (kGroups)
      v = number.of(group, p, j);
    else
      v = number(fetch(p));
    p += fetch.step;
    if constexpr (kOffset) return is_bias ? add(mul(v, s), o) : mul(sub(v, o), s);
    return mul(v, s);
  }
};

// How many vectors share a scale, for a Walker: 0 where it cannot walk.
PQ_INLINE int vectors_per_scale(const Weight& w) {
  if (w.grid_length == 1 || w.block % kGroup == 0) return 4;
  if (w.block == 2 * kWidth) return 2;
  return w.block == kWidth ? 1 : 0;
}

// Calls body with a Walker at the element `start` of a line, a multiple of kGroup. The scales given
// begin with that of `start`.
template <class Fetch, class N, class Body>
PQ_INLINE void with_walker(const Weight& w, const Fetch& fetch, const N& number, int64_t start,
                           const Body& body) {
  const int64_t per_block =
      w.grid_length == 1 ? INT64_MAX / kGroup : max64(1, w.block / kGroup);
  const int64_t into = w.grid_length == 1 ? 0 : start % w.block / kGroup;
  const bool is_bias = w.offset_kind == OffsetKind::kBias;
  const auto make = [&](auto per_scale, auto has_offset) PQ_INLINE_LAMBDA {
    using Kind = Walker<decltype(per_scale)::value, decltype(has_offset)::value, Fetch, N>;
    const auto at = [&](const uint8_t* p, const float* scale, const float* offset) PQ_INLINE_LAMBDA {
      Kind walker{fetch, number, is_bias, p, scale, offset, per_block, 0, zero(), zero(), {}};
      if (decltype(per_scale)::value == 4 && into) {
        walker.load_scale();
        walker.left = per_block - into;
      }
      return walker;
    };
    body(at);
  };
  const auto choose = [&](auto has_offset) PQ_INLINE_LAMBDA {
    switch (vectors_per_scale(w)) {
      case 4: make(Constant<4>(), has_offset); break;
      case 2: make(Constant<2>(), has_offset); break;
      default: make(Constant<1>(), has_offset);
    }
  };
  if (w.offset_kind == OffsetKind::kNone)
    choose(Constant<0>());
  else if constexpr (!std::is_same_v<N, Float8>)
    choose(Constant<1>());
}

// `count` elements from `p` with one scale and offset: writes whole vectors.
template <class Fetch, class N>
PQ_INLINE void decode_run(const Fetch& fetch, const N& number, OffsetKind kind, const uint8_t* p,
                          int64_t count, float scale, float offset, float half, float* out) {
  const F s = set1(scale), o = set1(offset);
  for (int64_t i = 0; i < count; i += kWidth, p += fetch.step) {
    F v = number(fetch(p));
    if (kind == OffsetKind::kZeroPoint) v = sub(v, o);
    v = mul(v, s);
    if (half != 1.0f) v = mul(v, set1(half));  // 2^-127, in two exact steps
    if (kind == OffsetKind::kBias) v = add(v, o);
    store(out + i, v);
  }
}

// Blocks of any length: runs of one scale where vectors fit in, else a scale for every element.
template <class Fetch, class N>
__attribute__((noinline)) void decode_any(const Weight& w, const Fetch& fetch, const N& number,
                                          const uint8_t* p, int64_t start, int64_t count,
                                          const float* scales, const float* offsets, float* out) {
  const int64_t block = w.block, g0 = start / block;
  const bool may_halve = w.scale.number == Number::kUE8M0;
  const bool has_offset = w.offset_kind != OffsetKind::kNone;
  if ((start + count - 1) / block == g0 || block % kWidth == 0) {
    for (int64_t at = 0, g = 0; at < count; ++g) {
      const int64_t end = min64(count, (g0 + g + 1) * block - start);
      const bool halve = may_halve && scales[g] == 0.0f;
      decode_run(fetch, number, w.offset_kind, p + at * w.bits / 8, end - at,
                 halve ? kTiny : scales[g], has_offset ? offsets[g] : 0.0f, halve ? 0.5f : 1.0f,
                 out + at);
      at = end;
    }
    return;
  }
  if (kWidth % block == 0 && start % block == 0 && !may_halve) {  // several blocks to a vector
    const Spread spread(static_cast<int>(block));
    const int64_t each = kWidth / block;
    for (int64_t i = 0; i < count; i += kWidth, p += fetch.step, scales += each, offsets += each) {
      const F v = number(fetch(p)), s = spread(scales);
      if (w.offset_kind == OffsetKind::kNone) {
        store(out + i, mul(v, s));
      } else {
        const F o = spread(offsets);
        store(out + i, w.offset_kind == OffsetKind::kBias ? add(mul(v, s), o) : mul(sub(v, o), s));
      }
    }
    return;
  }
  alignas(64) float scale[kSegment + 64], offset[kSegment + 64], halves[kSegment + 64];
  for (int64_t i = 0, g = 0, left = (g0 + 1) * block - start; i < count; ++i) {
    if (left-- == 0) ++g, left = block - 1;
    const bool halve = may_halve && scales[g] == 0.0f;
    scale[i] = halve ? kTiny : scales[g];
    halves[i] = halve ? 0.5f : 1.0f;
    if (has_offset) offset[i] = offsets[g];
  }
  for (int64_t i = 0; i < count; i += kWidth, p += fetch.step) {
    F v = number(fetch(p));
    if (w.offset_kind == OffsetKind::kZeroPoint) v = sub(v, load(offset + i));
    v = mul(v, load(scale + i));
    if (may_halve) v = mul(v, load(halves + i));
    if (w.offset_kind == OffsetKind::kBias) v = add(v, load(offset + i));
    store(out + i, v);
  }
}

// Whether a line of scales holds UE8M0's 2^-127, which is no float32 and reads as zero.
PQ_INLINE bool has_zero(const Grid& grid, int64_t grid_length, int64_t row, int64_t start,
                        int64_t count) {
  return grid.number == Number::kUE8M0 &&
         std::memchr(grid.data + row * grid_length + start, 0, static_cast<size_t>(count));
}

// Whether a Walker multiplies the scales by a power of two, which they must not be too large for.
PQ_INLINE bool folds_power(const Weight& w) {
  return Float8::kFolds && w.kind == Kind::kMinifloat && w.value_bits == 8;
}

// Whether a Walker may go along a line with these scales.
PQ_INLINE bool can_walk(const Weight& w, int64_t row, int64_t start, int64_t count,
                        const float* scales) {
  if (has_zero(w.scale, w.grid_length, row, start, count)) return false;
  if (!folds_power(w)) return true;
  bool small = true;
  for (int64_t i = 0; i < count; ++i) small &= scales[i] < 0x1p100f && scales[i] > -0x1p100f;
  return small;
}

// Elements [start, start + count) of `lines` lines, count <= kSegment and start a multiple of 8:
// line i to out + i * stride, and up to kWidth - 1 floats too many.
void decode_lines(const Weight& w, int64_t first_line, int64_t lines, int64_t start, int64_t count,
                  float* out, int64_t stride) {
  constexpr int64_t kRoom = 4 * (kSegment + 64);
  alignas(64) float scale_room[kRoom], offset_room[kRoom];
  alignas(64) uint8_t codes[kSegment + 3 * kOverread];
  const int64_t g0 = start / w.block, blocks = (start + count - 1) / w.block - g0 + 1;
  const int64_t first_byte = start * w.bits / 8, bytes = (count * w.bits + 7) / 8;
  const int64_t whole = start % kGroup == 0 ? count / kGroup * kGroup : 0;
  GridRows scales(w, w.scale, g0, blocks, scale_room, kRoom);
  GridRows offsets(w, w.offset, g0, blocks, offset_room, kRoom);
  const bool has_offset = w.offset_kind != OffsetKind::kNone;
  with_decoder(w, [&](const auto& fetch, const auto& number, auto is_common) PQ_INLINE_LAMBDA {
    const auto each_line = [&](const auto& walk) PQ_INLINE_LAMBDA {
      for (int64_t i = 0; i < lines; ++i, out += stride) {
        const int64_t line = first_line + i, row = w.grid_row(line);
        scales.need(row, 1);
        if (has_offset) offsets.need(row, 1);
        const float *const scale = scales.at(row), *const offset = offsets.at(row);
        const uint8_t* p = codes_at(w, line, first_byte, bytes, codes);
        const int64_t at = can_walk(w, row, g0, blocks, scale) ? walk(p, scale, offset) : 0;
        if (at == count) continue;
        const int64_t g = (start + at) / w.block - g0;
        decode_any(w, fetch, number, p + at * w.bits / 8, start + at, count - at, scale + g,
                   offset + g, out + at);
      }
    };
    if constexpr (decltype(is_common)::value) {
      if (whole && vectors_per_scale(w)) {
        with_walker(w, fetch, number, start, [&](const auto& walker_at) PQ_INLINE_LAMBDA {
          each_line([&](const uint8_t* p, const float* scale, const float* offset) PQ_INLINE_LAMBDA {
            auto walker = walker_at(p, scale, offset);
            for (int64_t at = 0; at < whole; at += kGroup) {
              walker.begin_group();
#pragma GCC unroll 4
              for (int j = 0; j < 4; ++j) store(out + at + j * kWidth, walker.next(j));
            }
            return whole;
          });
        });
        return;
      }
    }
    each_line([](const uint8_t*, const float*, const float*) PQ_INLINE_LAMBDA { return int64_t{0}; });
  });
}

// One segment of one line: see decode_lines; start is any number where lines of scales are read.
inline void decode_segment(const Weight& w, int64_t line, int64_t start, int64_t count, float* out) {
  const int64_t before = start % 8;  // a segment begins with a whole byte
  if (!before) {
    decode_lines(w, line, 1, start, count, out, 0);
    return;
  }
  alignas(64) float whole[kSegment + 64];
  for (int64_t at = 0; at < count; at += kSegment - 8) {
    const int64_t part = min64(kSegment - 8, count - at);
    decode_segment(w, line, start + at - before, part + before, whole);
    std::memcpy(out + at, whole + before, 4 * static_cast<size_t>(part));
  }
}

PQ_INLINE void write_row(const float* from, int64_t count, const Output& y, int64_t at) {
  if (y.type == Float::kF32) {
    std::memcpy(static_cast<float*>(y.data) + at, from, 4 * static_cast<size_t>(count));
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(y.data) + at;
  const bool is_half = y.type == Float::kF16;
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth)
    is_half ? to_f16(to + i, load(from + i)) : to_bf16(to + i, load(from + i));
  if (i < count) {
    alignas(64) float rest[kWidth] = {};
    uint16_t done[kWidth];
    std::memcpy(rest, from + i, 4 * static_cast<size_t>(count - i));
    is_half ? to_f16(done, load(rest)) : to_bf16(done, load(rest));
    std::memcpy(to + i, done, 2 * static_cast<size_t>(count - i));
  }
}

inline void decode(const Weight& w, int64_t first, int64_t last, const Output& y) {
  [[maybe_unused]] const FlushSubnormals mode;
  constexpr int64_t kLines = 8;
  alignas(64) float values[kLines * kSegment + 64];
  for (int64_t at = 0; at < w.length; at += kSegment) {
    const int64_t count = min64(kSegment, w.length - at);
    if (y.type == Float::kF32 && count % kWidth == 0) {
      float* to = static_cast<float*>(y.data) + first * y.row_stride + at;
      decode_lines(w, first, last - first, at, count, to, y.row_stride);
      continue;
    }
    for (int64_t line = first; line < last; line += kLines) {
      const int64_t lines = min64(kLines, last - line);
      decode_lines(w, line, lines, at, count, values, kSegment);
      for (int64_t i = 0; i < lines; ++i)
        write_row(values + i * kSegment, count, y, (line + i) * y.row_stride + at);
    }
  }
}

}  // namespace pq::PQ_TARGET
