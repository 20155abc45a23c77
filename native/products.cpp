#include "products.h"

#include <algorithm>
#include <stdexcept>

#include "pool.h"

namespace pq {

std::atomic<const Kernels*> chosen{usable_targets().front()};
std::atomic<int> num_threads{1};

int threads_for(int64_t work, int threads, int64_t least) {
  return work < least ? 1 : threads > 0 ? std::min(threads, kMostThreads) : num_threads.load();
}

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

int64_t product_of(const int64_t* extents, int count) {
  int64_t total = 1;
  for (int i = 0; i < count; ++i)
    require(extents[i] >= 0 && !__builtin_mul_overflow(total, extents[i], &total),
            "the extents are negative or too large");
  return total;
}

namespace {

thread_local Scratch x_scratch, codes_scratch, task_scratch;

// Those whose numbers the kernels know: e2m3, e3m2, e4m3 and e5m2.
void require_minifloat(const Weight& w) {
  const Minifloat& m = w.minifloat;
  const bool is_small = w.value_bits == 6, has_three = m.rest_shift == 7;
  const uint32_t sign = 1u << (w.value_bits - 1);
  const float power = is_small ? (has_three ? 16384.0f : 4096.0f) : has_three ? 256.0f : 1.0f;
  require((is_small || w.value_bits == 8) && (has_three || m.rest_shift == 8) &&
              m.sign_mask == sign && m.rest_mask == sign - 1 && m.power == power &&
              m.sign_shift == 16 - w.value_bits &&
              m.nan_code == (!is_small && has_three ? 0x7fu : 0u),
          "no such minifloat");
}

}  // namespace

Weight geometry(const std::vector<int64_t>& shape, const std::vector<int64_t>& block) {
  Weight w;
  require(!shape.empty() && shape.size() <= kMaxRank && block.size() == shape.size(),
          "a shape of 1 to 8 axes and a block of the same rank are wanted");
  w.leading = static_cast<int>(shape.size()) - 1;
  w.lines = product_of(shape.data(), w.leading);
  w.length = shape.back();
  require(w.length >= 0 && w.length < (int64_t{1} << 40), "no such length");
  product_of(shape.data(), w.leading + 1);  // all elements can be counted
  for (size_t axis = 0; axis < shape.size(); ++axis)
    require(block[axis] >= 1 && block[axis] <= std::max<int64_t>(1, shape[axis]),
            "a block is empty, or longer than its axis");
  for (int axis = 0; axis < w.leading; ++axis) {
    w.extent[axis] = shape[axis];
    w.lead_block[axis] = block[axis];
    w.grid_extent[axis] = ceil_div(shape[axis], block[axis]);
  }
  w.block = block.back();
  w.grid_length = ceil_div(w.length, w.block);
  w.grid_rows = product_of(w.grid_extent, w.leading);
  return w;
}

void set_meaning(Weight* w, const Meaning& given) {
  const auto [bits, value_bits, kind, is_signed, offset_kind, minifloat] = given;
  require(bits >= 1 && bits <= 8 && value_bits >= 1 && value_bits <= bits, "bits run from 1 to 8");
  require(kind >= 0 && kind <= 3 && offset_kind >= 0 && offset_kind <= 2, "unknown kind");
  w->bits = bits;
  w->value_bits = value_bits;
  w->kind = static_cast<Kind>(kind);
  w->is_signed = is_signed;
  w->offset_kind = static_cast<OffsetKind>(offset_kind);
  if (w->kind == Kind::kTable16) {
    require(value_bits <= 4, "a small table has up to 16 entries");
    require(bits <= 4 || bits == 8, "no such store");
  } else {
    require(bits >= 5, "no such store");
  }
  if (w->kind != Kind::kMinifloat) return;
  require(minifloat.size() == 6, "a minifloat is six numbers");
  w->minifloat = {minifloat[0], minifloat[1], static_cast<int>(minifloat[2]),
                  static_cast<int>(minifloat[3]), static_cast<float>(minifloat[4]), minifloat[5]};
  require_minifloat(*w);
}

Number number_of(int number) {
  require(number >= 0 && number < static_cast<int>(Number::kNested), "unknown scale type");
  return static_cast<Number>(number);
}

void decode(const Weight& w, const Output& y, int threads) {
  if (!w.lines || !w.length) return;
  const Kernels& k = *chosen;
  const int64_t step = std::max<int64_t>(1, (1 << 16) / w.length);
  parallel_for(ceil_div(w.lines, step), threads_for(w.lines * w.length, threads), [&](int64_t i) {
    k.decode(w, i * step, std::min(w.lines, (i + 1) * step), y);
  });
}

// -- float activations ------------------------------------------------------------------------

namespace {

void by_dots(const Weight& w, const Kernels& k, const Activations& a, const Output& y, int64_t first_line,
             int64_t count, int workers) {
  const int64_t stride = ceil_div(a.columns, 64) * 64 + 16;
  const Packed x{x_scratch.floats(k.dot_rows * stride), stride};
  k.pack_rows(a, 0, k.dot_rows, x);
  const int64_t step = std::max<int64_t>(8, ceil_div(count, 16 * workers));
  parallel_for(ceil_div(count, step), workers, [&](int64_t i) {
    k.dot(w, x, a.rows, first_line, i * step, std::min(count, (i + 1) * step), y);
  });
}

void by_rows(const Weight& w, const Kernels& k, const Activations& a, const Output& y, int64_t first_line,
             int64_t count, int workers) {
  const int columns = a.rows <= k.width ? k.width : k.panel_columns;
  const int64_t panels = ceil_div(a.rows, columns);
  const Packed x{x_scratch.floats(panels * a.columns * columns), a.columns * columns};
  parallel_for(panels, workers, [&](int64_t i) { k.pack_panels(a, i, i + 1, columns, x); });
  const int64_t step = k.panel_lines;
  const int64_t scratch = step * (k.panel_depth + 16) + step * panels * columns;
  parallel_for(ceil_div(count, step), workers, [&](int64_t i) {
    k.panel_rows(w, x, a.rows, columns, first_line, i * step, std::min(count, (i + 1) * step),
                 task_scratch.floats(scratch), y);
  });
}

void by_columns(const Weight& w, const Kernels& k, const Activations& a, const Output& y, int64_t first_line,
                int workers) {
  constexpr int64_t kColumns = 512;
  const int64_t stride = ceil_div(a.columns, 16) * 16 + 16;
  const int64_t rows = std::max<int64_t>(a.rows, 4);
  const Packed x{x_scratch.floats(rows * stride), stride};
  parallel_for(ceil_div(rows, 16), workers, [&](int64_t i) {
    k.pack_rows(a, i * 16, std::min(rows, i * 16 + 16), x);
  });
  // The fewer lines are cut, the better they are read.
  const int64_t wide = ceil_div(ceil_div(w.length, 2 * workers), kColumns) * kColumns;
  const int64_t step = a.rows > 4 ? kColumns : workers == 1 ? w.length : wide;
  const int64_t scratch =
      std::max(k.panel_depth * kColumns + a.rows * kColumns,
               a.rows > 4 ? 0 : 4 * step + 2 * few_grid(w));
  parallel_for(ceil_div(w.length, step), workers, [&](int64_t i) {
    k.panel_columns_of(w, x, a.rows, first_line, a.columns, i * step,
                       std::min(w.length, (i + 1) * step), task_scratch.floats(scratch), y);
  });
}

}  // namespace

void multiply(const Weight& w, const Activations& a, const Output& y, bool along_k,
              int64_t first_line, int64_t count, int threads) {
  if (!a.rows || !(along_k ? count : w.length)) return;
  const Kernels& k = *chosen;
  constexpr int64_t kMostRows = 512;  // as many as the sums of a panel leave in the cache
  for (int64_t m = 0; m < a.rows; m += kMostRows) {
    const int64_t rows = std::min(kMostRows, a.rows - m);
    const int item = a.type == Float::kF32 ? 4 : 2, out_item = y.type == Float::kF32 ? 4 : 2;
    Activations part = a;
    part.data = static_cast<const char*>(a.data) + m * a.row_stride * item;
    part.rows = rows;
    Output to = y;
    to.data = static_cast<char*>(y.data) + m * y.row_stride * out_item;
    const int workers = threads_for(rows * a.columns * (along_k ? count : w.length), threads);
    if (!along_k)
      by_columns(w, k, part, to, first_line, workers);
    else if (rows <= k.dot_rows)
      by_dots(w, k, part, to, first_line, count, workers);
    else
      by_rows(w, k, part, to, first_line, count, workers);
  }
  x_scratch.forget_if_large();
}

// -- products of integers ---------------------------------------------------------------------

namespace {

bool by_dots8(const Weight& w, const Kernels& k, const Weight8& kind, const Codes8& codes, int64_t rows,
              const Output& y, int workers) {
  const Step8 step = k.step8(kind);
  const int64_t steps = ceil_div(codes.padded, step.codes);
  const int64_t padded_rows = rows % 4 == 3 ? rows + 1 : rows;
  const int64_t stride = ceil_div(steps * step.codes / 32, 16) * 16 + 16;
  const int64_t scales = ceil_div(padded_rows * stride, 16) * 16;
  float* const memory = x_scratch.floats(scales + padded_rows * steps * step.bytes / 4);
  const Steps x{reinterpret_cast<uint8_t*>(memory + scales), memory, steps, rows, stride};
  parallel_for(ceil_div(padded_rows, 4), workers, [&](int64_t i) {
    k.pack_steps(codes, rows, i * 4, std::min(padded_rows, i * 4 + 4), kind, x);
  });
  std::atomic<bool> fine{true};
  // Few tasks: each begins where nothing was asked for ahead.
  const int64_t lines = std::max<int64_t>(16, ceil_div(w.lines, 2 * workers));
  parallel_for(ceil_div(w.lines, lines), workers, [&](int64_t i) {
    if (!k.dot8(w, kind, x, rows, 0, i * lines, std::min(w.lines, (i + 1) * lines), y))
      fine = false;
  });
  return fine;
}

bool by_panels8(const Weight& w, const Kernels& k, const Weight8& kind, const Codes8& codes, int64_t rows,
                const Output& y, int workers) {
  constexpr int64_t kMostRows = 512;
  std::atomic<bool> fine{true};
  for (int64_t m = 0; m < rows && fine; m += kMostRows) {
    const int64_t some = std::min(kMostRows, rows - m), panels = ceil_div(some, 32);
    const Codes8 part{codes.codes + m * codes.padded, codes.scales + m * codes.units, codes.padded,
                      codes.units};
    const int64_t per_unit = panels * 32 * codes.units;
    float* const memory = x_scratch.floats(2 * per_unit + panels * 32 * codes.padded / 4);
    const Panels8 x{reinterpret_cast<uint8_t*>(memory + 2 * per_unit), memory,
                    reinterpret_cast<int32_t*>(memory + per_unit)};
    parallel_for(panels, workers,
                 [&](int64_t i) { k.pack_panels8(part, kind, some, i, i + 1, x); });
    Output to = y;
    to.data = static_cast<char*>(y.data) + m * y.row_stride * (y.type == Float::kF32 ? 4 : 2);
    const int64_t step = k.panel_lines;
    const int64_t scratch =
        step * (panels * 32 + 2 * codes.units) + w.grid_length + 256 + kPanel8Room;
    parallel_for(ceil_div(w.lines, step), workers, [&](int64_t i) {
      if (!k.panel8(w, kind, part, x, some, 0, i * step, std::min(w.lines, (i + 1) * step),
                    task_scratch.floats(scratch), to))
        fine = false;
    });
  }
  return fine;
}

}  // namespace

bool has_codes_kernel(const Weight8& kind, int64_t rows) {
  const Kernels& k = *chosen;
  return k.panel8 || rows <= k.step8(kind).most_rows;
}

bool multiply_codes(const Weight& w, const Weight& x, const Weight8& kind, const Output& y,
                    int threads) {
  const int64_t rows = x.lines;
  if (!rows || !w.lines) return true;
  const Kernels& k = *chosen;
  if (!has_codes_kernel(kind, rows)) return false;
  const bool by_dots = rows <= k.step8(kind).most_rows;
  const int workers = threads_for(rows * w.lines * w.length, threads);
  const int64_t padded = ceil_div(w.length, 64) * 64, units = padded / 32;
  float* const memory = codes_scratch.floats(rows * (padded / 4 + units));
  const Codes8 codes{reinterpret_cast<int8_t*>(memory + rows * units), memory, padded, units};
  std::atomic<bool> fine{true};
  parallel_for(ceil_div(rows, 16), workers, [&](int64_t i) {
    if (!k.pack_codes(x, i * 16, std::min(rows, i * 16 + 16), codes)) fine = false;
  });
  if (fine) fine = by_dots ? by_dots8(w, k, kind, codes, rows, y, workers)
                           : by_panels8(w, k, kind, codes, rows, y, workers);
  x_scratch.forget_if_large();
  codes_scratch.forget_if_large();
  return fine;
}

}  // namespace pq
