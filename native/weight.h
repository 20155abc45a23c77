// What a stored weight is to the kernels: views of the canonical bytes, nothing copied.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pq {

// How a code becomes a number (before any scale).
enum class Kind : uint8_t {
  kTable16,    // up to 4 bits: one of 16 entries, whatever they mean
  kInteger,    // 5 to 8 bits
  kMinifloat,  // 6 and 8 bits, through float16
  kTable256,   // 5 to 8 bits: an entry of a table
};

enum class Number : uint8_t { kF32, kF16, kBF16, kUE8M0, kE4M3, kU8, kNested };

enum class OffsetKind : uint8_t { kNone, kZeroPoint, kBias };

// A minifloat's bits moved to where float16 has them, and the power of two between the two.
struct Minifloat {
  uint32_t sign_mask, rest_mask;
  int sign_shift, rest_shift;
  float power;
  uint32_t nan_code;  // the magnitude that stands for NaN where float16 has a number (e4m3), or 0
};

struct Weight;

// Scales or offsets: one number per block, row-major.
struct Grid {
  Number number = Number::kF32;
  const uint8_t* data = nullptr;
  int64_t size = 0;  // numbers in all
  const Weight* nested = nullptr;
  const float* tensor_scale = nullptr;  // multiplies every entry, or null
};

constexpr int kMaxRank = 8;

// A matrix of `lines` lines of `length` codes, packed along the line. Leading axes are flattened;
// `extent` and `block` keep their shape, because blocks may span them.
struct Weight {
  const uint8_t* data = nullptr;
  size_t size_bytes = 0;
  int64_t lines = 0, length = 0, line_bytes = 0;
  int bits = 8;          // of a stored code: 8 in a native store
  Kind kind = Kind::kTable16;
  bool is_signed = false;
  int value_bits = 8;
  Minifloat minifloat{};
  const float* table = nullptr;  // 2**value_bits entries (tables, and numbers of up to 4 bits)
  Grid scale, offset;
  OffsetKind offset_kind = OffsetKind::kNone;
  int64_t block = 1;             // along the line
  int64_t grid_length = 1;       // blocks of a line
  int64_t grid_rows = 1;
  int leading = 0;               // axes before the line
  int64_t extent[kMaxRank] = {}, lead_block[kMaxRank] = {}, grid_extent[kMaxRank] = {};

  // The row of the grid that a line's blocks lie in.
  int64_t grid_row(int64_t line) const {
    if (leading == 1 && lead_block[0] == 1) return line;
    int64_t row = 0, stride = 1;
    for (int axis = leading - 1; axis >= 0; --axis) {
      const int64_t at = line % extent[axis];
      line /= extent[axis];
      row += at / lead_block[axis] * stride;
      stride *= grid_extent[axis];
    }
    return row;
  }
};

// Few rows by lines along n: some lines at a time, over all columns, so that memory is read nearly as
// it lies. Floats for their scales, with a vector to spare.
constexpr int64_t kFewLines = 32;
inline int64_t few_grid(const Weight& w) {
  return (kFewLines + 2 + 16 / w.grid_length) * w.grid_length;
}

enum class Float : uint8_t { kF32, kF16, kBF16 };

// A float matrix: strides count elements.
struct Activations {
  const void* data;
  Float type;
  int64_t rows, columns, row_stride, column_stride;
};

struct Output {
  void* data;
  Float type;
  int64_t row_stride;  // columns are contiguous
};

constexpr int kMostPlanes = 3;

// A weight's codes as bytes for products of integers: value = (byte - bias) * factor.
struct Weight8 {
  int bits;            // of a stored code
  uint8_t mask, flip;  // byte = (code & mask) ^ flip, or
  // `planes` tables of 16 entries: byte = table[code & 15]. With several the value is the sum over
  // the bytes of (byte - bias) * power, times the factor; the first power is 1.
  const uint8_t* table;
  int planes;
  float powers[kMostPlanes];
  int bias;
  float factor;
  bool has_zero_point;  // an integer a block, subtracted too
};

// Rows of quantized x as int8, `padded` to whole steps, with a scale for every 32.
struct Codes8 {
  int8_t* codes;
  float* scales;
  int64_t padded, units;
};

// Codes of a step of dot8, the bytes that a row of x takes for it, and for how many rows it is the
// fastest.
struct Step8 {
  int codes, bytes, most_rows;
};

// x for dot8 (see integers-inl.h): 1 or 2 rows, or fours of them and then 1 or 2. scales: `stride`
// floats a row.
struct Steps {
  uint8_t* codes;
  float* scales;
  int64_t steps, rows, stride;
};

constexpr int64_t kPanel8Room = 3 << 14;  // floats: the bytes of a panel, and their scales

// x for panel8.
struct Panels8 {
  uint8_t* codes;
  float* scales;
  int32_t* sums;
};

struct Encoder;
struct Divisors;
struct Scales;
struct Codes;

// x made float32, in one of two layouts: padded rows, or panels of transposed rows.
struct Packed {
  float* data;
  int64_t stride;  // of a row or of a panel, in floats
};

// One instruction set's kernels. A range [first, last) is what one task of the pool does.
struct Kernels {
  const char* name;
  int width;  // float32 lanes of a vector
  int dot_rows, panel_lines, panel_depth, panel_columns;

  // The values of lines in stored order, rounded to the output's type.
  void (*decode)(const Weight&, int64_t first, int64_t last, const Output&);
  // Rows of x, each filled up with zeros to the stride.
  void (*pack_rows)(const Activations&, int64_t first, int64_t last, const Packed&);
  // Panels of `columns` rows of x side by side: [panel][k][columns].
  void (*pack_panels)(const Activations&, int64_t first, int64_t last, int columns, const Packed&);
  // y[m, n] for lines along k and up to dot_rows rows; x in rows. n counts from first_line.
  void (*dot)(const Weight&, const Packed&, int64_t rows, int64_t first_line, int64_t first,
              int64_t last, const Output&);
  // y[m, n] for lines along k; x in panels of `columns`.
  void (*panel_rows)(const Weight&, const Packed&, int64_t rows, int columns, int64_t first_line,
                     int64_t first, int64_t last, float* scratch, const Output&);
  // y[m, n] for `depth` lines along n; x in rows (zeros to 4 where there are fewer).
  void (*panel_columns_of)(const Weight&, const Packed&, int64_t rows, int64_t first_line,
                           int64_t depth, int64_t first, int64_t last, float* scratch,
                           const Output&);

  // Products of integers. They return false where a scale is too large for them.
  Step8 (*step8)(const Weight8&);
  bool (*pack_codes)(const Weight& x, int64_t first, int64_t last, const Codes8&);
  // Rows [first, last) of x, which begin with a four of them.
  void (*pack_steps)(const Codes8&, int64_t rows, int64_t first, int64_t last, const Weight8&,
                     const Steps&);
  bool (*dot8)(const Weight&, const Weight8&, const Steps&, int64_t rows, int64_t first_line,
               int64_t first, int64_t last, const Output&);
  // Null where float32 is as fast.
  void (*pack_panels8)(const Codes8&, const Weight8&, int64_t rows, int64_t first, int64_t last,
                       const Panels8&);
  bool (*panel8)(const Weight&, const Weight8&, const Codes8&, const Panels8&, int64_t rows,
                 int64_t first_line, int64_t first, int64_t last, float* scratch, const Output&);

  // Quantizing. x has a row a line; the Weight gives shape and blocks alone.
  bool (*all_finite)(const Activations&, int64_t first, int64_t last);
  // Lowest and highest number of every block of the lines, merged into low and high (by grid row);
  // with low null the largest magnitude into high.
  void (*ranges)(const Weight&, const Activations&, bool saturates, int64_t first, int64_t last,
                 float* low, float* high);
  void (*encode)(const Weight&, const Activations&, const Encoder&, const Divisors&, int64_t first,
                 int64_t last, const Codes&);
  // Blocks of one line each, without offsets: scales and codes in one go.
  void (*quantize)(const Weight&, const Activations&, const Encoder&, const Scales&, int64_t first,
                   int64_t last, const Codes&);
  // Sums that calibrations choose by, one per block: of magnitudes, or of squared errors.
  void (*block_sums)(const Weight&, const Activations&, const Encoder&, const Divisors&,
                     const float* numbers, int64_t first, int64_t last, double* out);
};

}  // namespace pq
