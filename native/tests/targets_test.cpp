// Every instruction set against plain C++ on random weights: decoded numbers, codes, scales and sums
// have the same bits, products lie within the bound of the contract. Needs no Python, so that it
// runs under emulators.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "../encode.h"
#include "../targets.h"

namespace pq {
namespace {

std::mt19937 rng(1);
long checks = 0, failures = 0;

int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(rng); }
float normal() { return std::normal_distribution<float>()(rng); }
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void check(bool holds, const char* what, const Kernels& k, const Weight& w) {
  ++checks;
  if (holds || ++failures > 20) return;
  std::fprintf(stderr, "%s: %s: kind %d, %d of %d bits, %lld x %lld, block %lld, scale %d, offset %d\n",
               k.name, what, static_cast<int>(w.kind), w.value_bits, w.bits,
               static_cast<long long>(w.lines), static_cast<long long>(w.length),
               static_cast<long long>(w.block), static_cast<int>(w.scale.number),
               static_cast<int>(w.offset_kind));
}

bool same_bits(float a, float b) { return std::memcmp(&a, &b, 4) == 0 || (a != a && b != b); }

// A weight and the memory that it points into. Codes have all bits, scales all finite ones.
struct Case {
  Weight w;
  std::vector<uint8_t> codes, scales, offsets;
  std::vector<float> table;
  Weight nested;
  std::vector<uint8_t> nested_codes, nested_scales;
  float tensor_scale = 0.0f;
};

std::vector<uint8_t> random_bytes(int64_t count) {
  std::vector<uint8_t> made(static_cast<size_t>(count));
  for (auto& byte : made) byte = static_cast<uint8_t>(pick(0, 255));
  return made;
}

void put16(std::vector<uint8_t>& to, uint32_t value) {
  to.push_back(static_cast<uint8_t>(value));
  to.push_back(static_cast<uint8_t>(value >> 8));
}

std::vector<uint8_t> numbers(Number number, int64_t count) {
  std::vector<uint8_t> made;
  for (int64_t i = 0; i < count; ++i) {
    const bool any = pick(0, 3) == 0;
    if (number == Number::kF32) {
      const float v = any ? std::ldexp(normal(), static_cast<int>(pick(-140, 60))) : 0.1f * normal();
      uint8_t bytes[4];
      std::memcpy(bytes, &v, 4);
      made.insert(made.end(), bytes, bytes + 4);
    } else if (number == Number::kF16) {
      const uint32_t bits = static_cast<uint32_t>(any ? pick(0, 0xffff) : pick(0x2800, 0x3400));
      put16(made, (bits & 0x7c00) == 0x7c00 ? 0 : bits);
    } else if (number == Number::kBF16) {
      put16(made, static_cast<uint32_t>(any ? pick(0, 0x5f80) : pick(0x3c00, 0x3f80)));
    } else if (number == Number::kUE8M0) {
      made.push_back(static_cast<uint8_t>(any ? pick(0, 180) : pick(120, 130)));
    } else {
      made.push_back(static_cast<uint8_t>(pick(0, number == Number::kE4M3 ? 126 : 15)));
    }
  }
  return made;
}

void give_grid(Weight& w, int64_t length, int64_t block) {
  w.length = length;
  w.block = std::min(block, std::max<int64_t>(length, 1));
  w.grid_length = ceil_div(length, w.block);
  w.leading = 1;
  w.extent[0] = w.lines;
  w.lead_block[0] = std::min<int64_t>(w.lines, pick(0, 3) ? 1 : pick(1, 5));
  w.grid_extent[0] = w.grid_rows = ceil_div(w.lines, w.lead_block[0]);
}

void fill(Case& c, Kind kind, int bits, int value_bits, Number number, OffsetKind offset_kind) {
  Weight& w = c.w;
  w.kind = kind;
  w.bits = bits;
  w.value_bits = value_bits;
  w.is_signed = pick(0, 1);
  w.line_bytes = ceil_div(w.length * bits, 8) + pick(0, 3);
  c.codes = random_bytes(w.lines * w.line_bytes);
  w.data = c.codes.data();
  w.size_bytes = c.codes.size();
  for (int i = 0; i < 1 << value_bits; ++i) c.table.push_back(normal());
  w.table = c.table.data();
  const uint32_t sign = 1u << (value_bits - 1);
  w.minifloat = value_bits == 8 ? Minifloat{sign, sign - 1, 8, 7, 256.0f, 0x7f}
                                : Minifloat{sign, sign - 1, 16 - value_bits, 8, 4096.0f, 0};
  const int64_t entries = w.grid_rows * w.grid_length;
  w.scale.number = number;
  if (number == Number::kNested) {
    Weight& inner = c.nested;
    inner.lines = w.grid_rows;
    give_grid(inner, w.grid_length, 8);
    inner.kind = Kind::kInteger;
    inner.bits = inner.value_bits = 6;
    inner.line_bytes = ceil_div(inner.length * 6, 8);
    c.nested_codes = random_bytes(inner.lines * inner.line_bytes);
    inner.data = c.nested_codes.data();
    inner.size_bytes = c.nested_codes.size();
    c.nested_scales = numbers(Number::kF16, inner.grid_rows * inner.grid_length);
    inner.scale.number = Number::kF16;
    inner.scale.data = c.nested_scales.data();
    inner.scale.size = inner.grid_rows * inner.grid_length;
    w.scale.nested = &inner;
  } else {
    c.scales = numbers(number, entries);
    w.scale.data = c.scales.data();
    w.scale.size = entries;
  }
  if (number == Number::kE4M3) {
    c.tensor_scale = 0.01f;
    w.scale.tensor_scale = &c.tensor_scale;
  }
  w.offset_kind = offset_kind;
  w.offset.number = offset_kind == OffsetKind::kZeroPoint ? Number::kU8 : Number::kF16;
  c.offsets = numbers(w.offset.number, entries);
  w.offset.data = c.offsets.data();
  w.offset.size = entries;
}

// -- decoded numbers ----------------------------------------------------------------------------

std::vector<float> decoded(const Kernels& k, const Weight& w) {
  std::vector<float> out(static_cast<size_t>(w.lines * w.length));
  k.decode(w, 0, w.lines, {out.data(), Float::kF32, w.length});
  return out;
}

void check_decode(const Kernels& plain, const Kernels& k, const Weight& w) {
  const std::vector<float> wanted = decoded(plain, w), got = decoded(k, w);
  bool same = true;
  for (size_t i = 0; i < wanted.size(); ++i) same &= same_bits(wanted[i], got[i]);
  check(same, "decode", k, w);
  for (const Float type : {Float::kF16, Float::kBF16}) {
    std::vector<uint16_t> a(wanted.size()), b(wanted.size());
    plain.decode(w, 0, w.lines, {a.data(), type, w.length});
    k.decode(w, 0, w.lines, {b.data(), type, w.length});
    for (size_t i = 0; i < a.size(); ++i)
      if (wanted[i] != wanted[i]) b[i] = a[i];
    check(a == b, "decode to 16 bits", k, w);
  }
}

// -- products -------------------------------------------------------------------------------------

// y (rows, columns) against x (rows, depth) @ b, with b[depth][columns] given by `at`.
template <class At>
bool within_bound(const std::vector<float>& y, const std::vector<float>& x, int64_t rows,
                  int64_t depth, int64_t columns, const At& at) {
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t n = 0; n < columns; ++n) {
      double wanted = 0, size = 0;
      for (int64_t i = 0; i < depth; ++i) {
        const double term = static_cast<double>(x[static_cast<size_t>(m * depth + i)]) * at(i, n);
        wanted += term;
        size += std::fabs(term);
      }
      if (!(size < 1e37)) continue;  // NaN, or beyond float32
      // Subnormal terms count as zeros.
      const double bound = 8 * std::sqrt(static_cast<double>(depth)) * 0x1p-24 * size + depth * 0x1p-118;
      if (!(std::fabs(y[static_cast<size_t>(m * columns + n)] - wanted) <= bound)) return false;
    }
  return true;
}

void check_products(const Kernels& plain, const Kernels& k, const Weight& w) {
  const std::vector<float> values = decoded(plain, w);
  for (const int64_t rows : {int64_t{1}, int64_t{3}, pick(5, 40)}) {
    for (const bool along_k : {true, false}) {
      const int64_t depth = along_k ? w.length : w.lines, columns = along_k ? w.lines : w.length;
      std::vector<float> x(static_cast<size_t>(rows * depth)), y(static_cast<size_t>(rows * columns), NAN);
      for (float& v : x) v = normal();
      const Activations a{x.data(), Float::kF32, rows, depth, depth, 1};
      const Output out{y.data(), Float::kF32, columns};
      const int64_t stride = ceil_div(depth, 64) * 64 + 16, padded = std::max<int64_t>(rows, 4);
      std::vector<float> packed(static_cast<size_t>(padded * stride));
      if (!along_k || rows <= k.dot_rows) {
        k.pack_rows(a, 0, padded, {packed.data(), stride});
        std::vector<float> scratch(static_cast<size_t>(k.panel_depth * 512 + rows * 512));
        if (along_k)
          k.dot(w, {packed.data(), stride}, rows, 0, 0, columns, out);
        else
          k.panel_columns_of(w, {packed.data(), stride}, rows, 0, depth, 0, columns, scratch.data(), out);
      } else {
        const int width = rows <= k.width ? k.width : k.panel_columns;
        const int64_t panels = ceil_div(rows, width);
        packed.resize(static_cast<size_t>(panels * depth * width));
        const Packed to{packed.data(), depth * width};
        k.pack_panels(a, 0, panels, width, to);
        std::vector<float> scratch(static_cast<size_t>(k.panel_lines * (k.panel_depth + 16 + panels * width)));
        k.panel_rows(w, to, rows, width, 0, 0, columns, scratch.data(), out);
      }
      const auto at = [&](int64_t i, int64_t n) {
        return static_cast<double>(values[static_cast<size_t>(along_k ? n * w.length + i : i * w.length + n)]);
      };
      check(within_bound(y, x, rows, depth, columns, at), along_k ? "product along k" : "product along n", k, w);
    }
  }
}

void check_integers(const Kernels& plain, const Kernels& k, Case& c) {
  Weight& w = c.w;
  if (w.kind != Kind::kInteger && w.kind != Kind::kTable16) return;
  if (w.bits != w.value_bits || (w.grid_length > 1 && w.block % 32)) return;
  if (w.offset_kind == OffsetKind::kBias || w.scale.number == Number::kNested) return;
  // Codes as unsigned numbers, or a table of 16 whole ones.
  w.is_signed = false;
  const bool has_table = w.bits == 4 && w.offset_kind == OffsetKind::kNone && pick(0, 1);
  const int planes = has_table ? pick(1, 3) : 0;
  const float powers[kMostPlanes] = {1.0f, 0x1p-4f, 0x1p-8f};  // every value is a float32
  uint8_t entries[16 * kMostPlanes];
  for (int i = 0; i < 1 << w.value_bits; ++i) {
    float value = planes ? 0.0f : static_cast<float>(i);
    for (int plane = 0; plane < planes; ++plane) {
      entries[16 * plane + i] = static_cast<uint8_t>(pick(1, 255));
      value += powers[plane] * (entries[16 * plane + i] - 128.0f);
    }
    if (w.kind == Kind::kTable16) c.table[static_cast<size_t>(i)] = value;
  }
  const uint8_t mask = static_cast<uint8_t>((1 << w.bits) - 1);
  const Weight8 kind{w.bits, mask, 0, has_table ? entries : nullptr, planes,
                     {powers[0], powers[1], powers[2]}, has_table ? 128 : 0, 1.0f,
                     w.offset_kind == OffsetKind::kZeroPoint};
  if (!k.step8(kind).most_rows) return;
  Case left;
  left.w.lines = pick(1, 11);
  give_grid(left.w, w.length, 32);
  fill(left, Kind::kInteger, 8, 8, Number::kUE8M0, OffsetKind::kNone);
  left.w.is_signed = true;
  for (auto& scale : left.scales) scale = static_cast<uint8_t>(120 + scale % 8);
  const int64_t rows = left.w.lines, padded = ceil_div(w.length, 64) * 64, units = padded / 32;
  std::vector<int8_t> codes(static_cast<size_t>(rows * padded));
  std::vector<float> unit_scales(static_cast<size_t>(rows * units));
  const Codes8 packed{codes.data(), unit_scales.data(), padded, units};
  check(k.pack_codes(left.w, 0, rows, packed), "codes", k, left.w);
  const Step8 step = k.step8(kind);
  const int64_t steps = ceil_div(padded, step.codes), some = rows % 4 == 3 ? rows + 1 : rows;
  const int64_t stride = ceil_div(steps * step.codes / 32, 16) * 16 + 16;
  std::vector<uint8_t> step_codes(static_cast<size_t>(some * steps * step.bytes));
  std::vector<float> scales(static_cast<size_t>(some * stride));
  const Steps x{step_codes.data(), scales.data(), steps, rows, stride};
  for (int64_t m = 0; m < some; m += 4) k.pack_steps(packed, rows, m, std::min(some, m + 4), kind, x);
  std::vector<float> y(static_cast<size_t>(rows * w.lines));
  if (!k.dot8(w, kind, x, rows, 0, 0, w.lines, {y.data(), Float::kF32, w.lines})) return;  // a large scale
  const std::vector<float> a = decoded(plain, left.w), b = decoded(plain, w);
  const auto at = [&](int64_t i, int64_t n) { return static_cast<double>(b[static_cast<size_t>(n * w.length + i)]); };
  check(within_bound(y, a, rows, w.length, w.lines, at), "product of codes", k, w);
}

// -- codes ----------------------------------------------------------------------------------------

struct Written {
  std::vector<uint8_t> codes, scales;
  std::vector<float> low, high;
  std::vector<double> sums;
  bool finite = false;
  bool operator==(const Written& o) const {
    return codes == o.codes && scales == o.scales && low == o.low && high == o.high &&
           sums == o.sums && finite == o.finite;
  }
};

struct Request {
  Activations x;
  Encoder e;
  Number number;
  std::vector<float> divisor, offset, numbers;
};

Written written(const Kernels& k, const Weight& w, const Request& r) {
  Written made;
  const int64_t line_bytes = ceil_div(w.length * r.e.store_bits, 8) + 1, entries = w.grid_rows * w.grid_length;
  made.finite = k.all_finite(r.x, 0, w.lines);
  made.low.assign(static_cast<size_t>(entries), INFINITY);
  made.high.assign(static_cast<size_t>(entries), -INFINITY);
  k.ranges(w, r.x, false, 0, w.lines, made.low.data(), made.high.data());
  made.codes.resize(static_cast<size_t>(w.lines * line_bytes));
  const Divisors by{r.divisor.data(), nullptr, r.offset.data()};
  k.encode(w, r.x, r.e, by, 0, w.lines, {made.codes.data(), line_bytes});
  if (w.lead_block[0] != 1 || r.e.offset_kind != OffsetKind::kNone) return made;
  made.sums.resize(static_cast<size_t>(entries));
  k.block_sums(w, r.x, r.e, by, r.numbers.data(), 0, w.lines, made.sums.data());
  std::vector<uint8_t> second(made.codes.size());
  made.scales.resize(static_cast<size_t>(entries * 4));
  k.quantize(w, r.x, r.e, {made.scales.data(), r.number, 7.0f}, 0, w.lines, {second.data(), line_bytes});
  made.codes.insert(made.codes.end(), second.begin(), second.end());
  return made;
}

void check_codes(const Kernels& plain, const Kernels& k, const Weight& w) {
  Request r;
  const bool turned = pick(0, 1);
  std::vector<float> x(static_cast<size_t>(w.lines * w.length));
  for (float& v : x) v = pick(0, 5) ? normal() : std::ldexp(normal(), static_cast<int>(pick(-140, 20)));
  r.x = {x.data(), Float::kF32, w.lines, w.length, turned ? 1 : w.length, turned ? w.lines : 1};
  std::vector<float> midpoints;
  std::vector<uint8_t> codes;
  r.e.code = static_cast<Code>(pick(0, 2));
  r.e.value_bits = static_cast<int>(r.e.code == Code::kMinifloat ? 8 : pick(1, 8));
  r.e.store_bits = pick(0, 1) ? r.e.value_bits : 8;
  r.e.low = static_cast<float>(-(1 << (r.e.value_bits - 1)));
  r.e.high = r.e.code == Code::kMinifloat ? 448.0f : static_cast<float>((1 << (r.e.value_bits - 1)) - 1);
  r.e.mantissa_bits = 3;
  r.e.bias = 7;
  for (int i = 0; i < 1 << r.e.value_bits; ++i) {
    if (i) midpoints.push_back(normal());
    codes.push_back(static_cast<uint8_t>(i));
  }
  std::sort(midpoints.begin(), midpoints.end());
  r.e.midpoints = midpoints.data();
  r.e.codes = codes.data();
  r.e.midpoint_count = static_cast<int>(midpoints.size());
  r.e.offset_kind = static_cast<OffsetKind>(r.e.code == Code::kInteger ? pick(0, 2) : 0);
  r.e.rounds_first = pick(0, 1);
  r.number = static_cast<Number>(pick(0, 4));
  for (int64_t i = 0; i < w.grid_rows * w.grid_length; ++i) {
    r.divisor.push_back(pick(0, 9) ? std::fabs(0.3f * normal()) : 0.0f);
    r.offset.push_back(std::nearbyint(3 * normal()));
  }
  for (int i = 0; i < 256; ++i) r.numbers.push_back(normal());
  check(written(k, w, r) == written(plain, w, r), "codes, scales, ranges or sums", k, w);
}

// -- all ------------------------------------------------------------------------------------------

void run(const Kernels& plain, const Kernels& k, long cases) {
  const int64_t blocks[] = {1, 2, 3, 8, 16, 24, 32, 64, 128, 1000};
  for (long i = 0; i < cases; ++i) {
    Case c;
    c.w.lines = pick(1, 70);
    give_grid(c.w, pick(0, 9) ? pick(1, 140) : pick(1, 1400), blocks[pick(0, 9)]);
    const Kind kind = static_cast<Kind>(pick(0, 3));
    const int value_bits = static_cast<int>(kind == Kind::kTable16     ? pick(1, 4)
                                            : kind == Kind::kMinifloat ? 6 + 2 * pick(0, 1)
                                                                       : pick(5, 8));
    const int bits = pick(0, 4) ? value_bits : 8;
    const Number numbers[] = {Number::kF32, Number::kF16, Number::kBF16, Number::kUE8M0, Number::kE4M3, Number::kNested};
    fill(c, kind, bits, value_bits, numbers[pick(0, 5)], static_cast<OffsetKind>(pick(0, 2)));
    check_decode(plain, k, c.w);
    check_products(plain, k, c.w);
    check_integers(plain, k, c);
    check_codes(plain, k, c.w);
  }
}

}  // namespace
}  // namespace pq

int main(int count, char** arguments) {
  const long cases = count > 1 ? std::atol(arguments[1]) : 500;
  const auto targets = pq::usable_targets();
  for (const pq::Kernels* k : targets) {
    pq::rng.seed(1);
    const long before = pq::failures;
    pq::run(*targets.back(), *k, cases);
    std::printf("%s: %ld failures\n", k->name, pq::failures - before);
  }
  std::printf("%ld checks, %ld failures\n", pq::checks, pq::failures);
  return pq::failures != 0;
}
