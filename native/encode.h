// How numbers become codes: what quantizing needs besides the geometry of a Weight.
#pragma once

#include "weight.h"

namespace pq {

enum class Code : uint8_t { kInteger, kMinifloat, kTable };

struct Encoder {
  Code code = Code::kInteger;
  int value_bits = 8, store_bits = 8;
  bool extends_sign = false;       // a native store of a narrow signed integer
  float low = 0.0f, high = 0.0f;   // the range of an integer; high is a minifloat's largest number
  int mantissa_bits = 0, bias = 0;  // of a minifloat
  const float* midpoints = nullptr;  // of a table, ascending
  const uint8_t* codes = nullptr;    // codes[count of midpoints strictly below]
  int midpoint_count = 0;
  OffsetKind offset_kind = OffsetKind::kNone;
  bool rounds_first = true;  // an integer zero point is added after rounding, a float one before
  bool saturates = false;    // NaN is 0; infinities are 0 for a range, else the largest number
};

// Scales that are known: one divisor per block (times 1/2 where half says so), offsets likewise.
struct Divisors {
  const float* value;
  const float* half;    // or null
  const float* offset;  // or null
};

// Scales that are found: alpha / range, rounded up to a type.
struct Scales {
  void* data;
  Number number;
  float range;
};

struct Codes {
  uint8_t* data;
  int64_t line_bytes;
};

}  // namespace pq
