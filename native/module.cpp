// The Python side: checks every shape, dtype and size again, then shares the work out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "cuda_launch.h"
#include "encode.h"
#include "pool.h"
#include "products.h"
#include "xla_product.h"

namespace nb = nanobind;

namespace pq {
namespace {

using Array = nb::ndarray<nb::ro, nb::device::cpu>;
using Writable = nb::ndarray<nb::device::cpu>;

// -- instruction sets -------------------------------------------------------------------------

std::vector<std::string> targets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : usable_targets()) names.emplace_back(kernels->name);
  return names;
}

void set_target(const std::string& name) {
  for (const Kernels* kernels : usable_targets())
    if (name == kernels->name) {
      chosen = kernels;
      return;
    }
  throw std::invalid_argument("this processor has no instruction set of that name");
}

void set_num_threads(int count) {
  if (count < 1 || count > kMostThreads) throw std::invalid_argument("1 to 1024 threads");
  num_threads = count;
}

// -- checks -----------------------------------------------------------------------------------

bool is_contiguous(const Array& array) {
  int64_t expected = 1;
  if (!array.size()) return true;
  for (int axis = static_cast<int>(array.ndim()) - 1; axis >= 0; --axis) {
    if (array.shape(axis) != 1 && array.stride(axis) != expected) return false;
    expected *= static_cast<int64_t>(array.shape(axis));
  }
  return true;
}

template <class A>
Float float_of(const A& array) {
  const auto type = array.dtype();
  if (type == nb::dtype<float>()) return Float::kF32;
  if (type.bits == 16 && type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float))
    return Float::kF16;
  // NumPy has no bfloat16: its bits come as uint16.
  if (type.bits == 16 && (type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat) ||
                          type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt)))
    return Float::kBF16;
  throw std::invalid_argument("a float32, float16 or bfloat16 array is wanted");
}

// How a weight's codes are bytes for products of integers.
class Bytes {
 public:
  Bytes(int bits, int mask, int flip, std::vector<uint8_t> table, const std::vector<float>& powers,
        int bias, float factor, bool has_zero_point)
      : table_(std::move(table)) {
    const int planes = static_cast<int>(table_.size() / 16);
    require(bits >= 1 && bits <= 8 && mask >= 0 && mask < 256 && flip >= 0 && flip < 256 &&
                bias >= 0 && bias <= 128 && table_.size() % 16 == 0 &&
                static_cast<int>(powers.size()) == planes && planes <= kMostPlanes &&
                (planes < 2 || bits == 4),
            "no such codes");
    require(planes == 0 || (bits != 2 && !has_zero_point), "no such table");
    kind_ = {bits, static_cast<uint8_t>(mask), static_cast<uint8_t>(flip), nullptr, planes, {},
             bias, factor, has_zero_point};
    std::copy(powers.begin(), powers.end(), kind_.powers);
  }
  Weight8 kind() const {
    Weight8 found = kind_;
    found.table = table_.empty() ? nullptr : table_.data();
    return found;
  }

 private:
  Weight8 kind_{};
  std::vector<uint8_t> table_;
};

// -- the stored weight ------------------------------------------------------------------------

class Matrix {
 public:
  Matrix(Array data, const std::vector<int64_t>& shape, const std::vector<int64_t>& block, int bits,
         int value_bits, int kind, bool is_signed, const std::vector<uint32_t>& minifloat,
         std::optional<Array> table, nb::object scales, int scale_number,
         std::optional<Array> tensor_scale, nb::object offsets, int offset_number, int offset_kind)
      : data_(data), table_(table), tensor_scale_(tensor_scale), scales_(scales), offsets_(offsets) {
    w_ = geometry(shape, block);
    set_meaning(&w_, {bits, value_bits, kind, is_signed, offset_kind, minifloat});
    set_table();
    if (!w_.lines || !w_.length) return;  // nothing else is read
    set_data();
    w_.scale = grid(scales_, scale_number);
    if (w_.offset_kind != OffsetKind::kNone) w_.offset = grid(offsets_, offset_number);
    if (tensor_scale_) {
      require(tensor_scale_->dtype() == nb::dtype<float>() && tensor_scale_->size() == 1,
              "the tensor scale is one float32");
      w_.scale.tensor_scale = static_cast<const float*>(tensor_scale_->data());
    }
  }

  void decode(Writable out, int threads) const {
    require(static_cast<int64_t>(out.size()) == w_.lines * w_.length && is_contiguous(Array(out)),
            "the output must be contiguous, of the weight's size");
    const Output y{out.data(), float_of(out), w_.length};
    nb::gil_scoped_release release;
    pq::decode(w_, y, threads);
  }

  // out (m, n) = x (m, k) @ the lines [first, first + count): along k, or along n.
  void matmul(const Array& x, const Writable& out, bool along_k, int64_t first_line, int64_t count,
              int threads) const {
    require(x.ndim() == 2 && out.ndim() == 2, "x and the output have two axes");
    require(first_line >= 0 && count >= 0 && first_line <= w_.lines - count, "no such lines");
    const int64_t rows = static_cast<int64_t>(x.shape(0));
    const int64_t depth = along_k ? w_.length : count, columns = along_k ? count : w_.length;
    require(static_cast<int64_t>(x.shape(1)) == depth, "x does not fit the weight");
    require(static_cast<int64_t>(out.shape(0)) == rows &&
                static_cast<int64_t>(out.shape(1)) == columns,
            "the output does not fit");
    require(columns < 2 || !rows || out.stride(1) == 1, "the output's rows must be contiguous");
    const Activations a{x.data(), float_of(x), rows, depth, x.stride(0), x.stride(1)};
    const Output y{out.data(), float_of(out), out.stride(0)};
    nb::gil_scoped_release release;
    multiply(w_, a, y, along_k, first_line, count, threads);
  }

  // out (m, n) = x @ this, transposed, by products of integers; false where a scale is too large
  // for them, or float32 is as fast.
  bool matmul_codes(const Matrix& x, const Bytes& bytes, const Writable& out, int threads) const {
    require(x.w_.kind != Kind::kMinifloat && x.w_.kind != Kind::kTable256, "no such codes");
    const Output y = check_codes(x.w_, bytes.kind(), out);
    nb::gil_scoped_release release;
    return multiply_codes(w_, x.w_, bytes.kind(), y, threads);
  }

  const Weight& stored() const { return w_; }

  // The output of a product of codes. Refuses what does not fit.
  Output check_codes(const Weight& x, const Weight8& kind, const Writable& out) const {
    require(kind.bits == w_.bits, "no such codes");
    require(kind.has_zero_point == (w_.offset_kind == OffsetKind::kZeroPoint), "no such zero points");
    require(x.length == w_.length && w_.length > 0, "x does not fit the weight");
    for (const Weight* side : {&x, &w_})
      require(side->grid_length == 1 || side->block % 32 == 0, "blocks of 32 codes are wanted");
    require(out.ndim() == 2 && static_cast<int64_t>(out.shape(0)) == x.lines &&
                static_cast<int64_t>(out.shape(1)) == w_.lines && (w_.lines < 2 || !x.lines || out.stride(1) == 1),
            "the output does not fit");
    return {out.data(), float_of(out), out.stride(0)};
  }

 private:
  void set_data() {
    require(data_.dtype() == nb::dtype<uint8_t>() && data_.ndim() >= 1, "codes are uint8");
    w_.data = static_cast<const uint8_t*>(data_.data());
    // Lines may lie apart (a view of wider ones), if all lie equally far apart.
    const int last = static_cast<int>(data_.ndim()) - 1;
    const int64_t bytes = static_cast<int64_t>(data_.shape(last));
    require(bytes < 2 || data_.stride(last) == 1, "a line of codes must be contiguous");
    int64_t lines = 1, apart = bytes;
    for (int axis = last - 1; axis >= 0; --axis) {
      if (data_.shape(axis) == 1) continue;
      if (lines == 1) apart = data_.stride(axis);
      require(data_.stride(axis) == apart * lines, "the lines of codes must lie equally far apart");
      lines *= static_cast<int64_t>(data_.shape(axis));
    }
    require(lines == w_.lines && apart >= 0, "the codes do not fit the shape");
    require(bytes >= ceil_div(w_.length * w_.bits, 8), "too few bytes of codes");
    w_.line_bytes = apart;
    w_.size_bytes = static_cast<size_t>((lines - 1) * apart + bytes);
  }

  void set_table() {
    if (!has_table(w_)) return;
    require(table_ && table_->dtype() == nb::dtype<float>() && is_contiguous(*table_) &&
                static_cast<int64_t>(table_->size()) >= (int64_t{1} << w_.value_bits),
            "a table holds a contiguous float32 for every code");
    w_.table = static_cast<const float*>(table_->data());
  }

  Grid grid(nb::handle part, int number) {
    const int64_t rows = w_.grid_rows;
    Grid made;
    if (nb::isinstance<Matrix>(part)) {
      made.number = Number::kNested;
      const Matrix& inner = nb::cast<const Matrix&>(part);
      made.nested = &inner.w_;
      require(made.nested->lines == rows && made.nested->length == w_.grid_length,
              "the scales do not fit the blocks");
      depth_ = std::max(depth_, inner.depth_ + 1);
      require(depth_ <= kMostLevels, "scales of scales of scales: too many levels");
      return made;
    }
    made.number = number_of(number);
    Array array;
    require(nb::try_cast(part, array), "scales are an array or a Matrix");
    kept_.push_back(array);
    require(array.dtype().bits == bits_of(made.number) && is_contiguous(array) &&
                static_cast<int64_t>(array.size()) == rows * w_.grid_length,
            "the scales do not fit the blocks");
    made.data = static_cast<const uint8_t*>(array.data());
    made.size = rows * w_.grid_length;
    return made;
  }

  Weight w_;
  Array data_;
  std::optional<Array> table_, tensor_scale_;
  nb::object scales_, offsets_;  // kept alive, as these are: the weight points into them
  std::vector<Array> kept_;
  int depth_ = 0;
};

// -- quantizing -------------------------------------------------------------------------------

int64_t grid_size(const Weight& w) {
  return w.grid_rows * w.grid_length;
}

Activations lines_of(const Array& x, const Weight& w) {
  require(x.ndim() == 2 && static_cast<int64_t>(x.shape(0)) == w.lines &&
              static_cast<int64_t>(x.shape(1)) == w.length,
          "x must have a row for every line");
  return {x.data(), float_of(x), w.lines, w.length, x.stride(0), x.stride(1)};
}

template <class T, class A>
T* pointer(const A& array, int64_t size, const char* what) {
  require(array.dtype() == nb::dtype<T>() && static_cast<int64_t>(array.size()) == size &&
              is_contiguous(Array(array)),
          what);
  return static_cast<T*>(const_cast<void*>(static_cast<const void*>(array.data())));
}

thread_local Scratch rounded_scratch;

// What becomes of a number, as Python says it.
class Coder {
 public:
  Coder(int code, int value_bits, int store_bits, bool extends_sign, float low, float high,
        int mantissa_bits, int bias, std::vector<float> midpoints, std::vector<uint8_t> codes,
        int offset_kind, bool rounds_first)
      : midpoints_(std::move(midpoints)), codes_(std::move(codes)) {
    require(code >= 0 && code <= 2 && offset_kind >= 0 && offset_kind <= 2, "unknown kind");
    require(value_bits >= 1 && value_bits <= store_bits && store_bits <= 8, "bits run from 1 to 8");
    require(mantissa_bits >= 0 && mantissa_bits < 8 && bias >= 0 && bias < 100, "no such minifloat");
    // Codes index tables, so a minifloat's largest number must have one.
    const int exponent_bits = value_bits - 1 - mantissa_bits;
    require(code != 1 || (exponent_bits >= 1 && high <= std::ldexp(2.0f - std::ldexp(1.0f, -mantissa_bits),
                                                                   (1 << exponent_bits) - 1 - bias)),
            "a minifloat's largest number is beyond its codes");
    require(code != 2 || (codes_.size() == midpoints_.size() + 1 && codes_.size() <= 256),
            "a table has a code more than midpoints");
    e_.code = static_cast<Code>(code);
    e_.value_bits = value_bits;
    e_.store_bits = store_bits;
    e_.extends_sign = extends_sign;
    e_.low = low;
    e_.high = high;
    e_.mantissa_bits = mantissa_bits;
    e_.bias = bias;
    e_.offset_kind = static_cast<OffsetKind>(offset_kind);
    e_.rounds_first = rounds_first;
  }

  // out (m, n) = x, quantized by these integers in blocks along its lines with float32 scales, times
  // the weight, transposed. None where x is not finite, else as Matrix::matmul_codes.
  std::optional<bool> matmul(const Array& x, int64_t block, float range, const Matrix& weight,
                             const Bytes& bytes, const Writable& out, int threads) const {
    require(e_.code == Code::kInteger && e_.offset_kind == OffsetKind::kNone && e_.low >= -128 &&
                e_.high <= 127 && range > 0,
            "signed integers are wanted");
    require(x.ndim() == 2, "x has two axes");
    const int64_t rows = static_cast<int64_t>(x.shape(0));
    Weight w = geometry({rows, static_cast<int64_t>(x.shape(1))}, {1, block});
    const Activations a = lines_of(x, w);
    const Weight8 kind = bytes.kind();
    const Output y = weight.check_codes(w, kind, out);
    nb::gil_scoped_release release;
    if (!has_codes_kernel(kind, rows)) return false;
    const Kernels& k = *chosen;
    const int workers = threads_for(rows * w.length, threads);
    const int64_t step = std::max<int64_t>(16, (1 << 16) / w.length / 16 * 16);
    const int64_t tasks = ceil_div(rows, step), grid = rows * w.grid_length;
    float* const memory = rounded_scratch.floats(ceil_div(grid, 16) * 16 + ceil_div(rows * w.length, 4));
    uint8_t* const codes = reinterpret_cast<uint8_t*>(memory + ceil_div(grid, 16) * 16);
    Encoder e = e_;
    e.store_bits = 8;
    e.extends_sign = true;
    const Scales scales{memory, Number::kF32, range};
    std::atomic<bool> finite{true};
    parallel_for(tasks, workers, [&](int64_t i) {
      const int64_t first = i * step, last = std::min(rows, first + step);
      if (!k.all_finite(a, first, last))
        finite = false;
      else
        k.quantize(w, a, e, scales, first, last, {codes, w.length});
    });
    std::optional<bool> done;
    if (finite) {
      w.data = codes;
      w.size_bytes = static_cast<size_t>(rows * w.length);
      w.line_bytes = w.length;
      w.scale = {Number::kF32, reinterpret_cast<const uint8_t*>(memory), grid, nullptr, nullptr};
      done = multiply_codes(weight.stored(), w, kind, y, threads);
    }
    rounded_scratch.forget_if_large();
    return done;
  }

  // Codes of x by known divisors.
  void encode(const Array& x, Writable out, const std::vector<int64_t>& shape,
              const std::vector<int64_t>& block, const Array& divisor,
              const std::optional<Array>& half, const std::optional<Array>& offset, bool saturates,
              int threads) const {
    const Weight w = geometry(shape, block);
    const Activations a = lines_of(x, w);
    const int64_t blocks = grid_size(w);
    const Divisors by{pointer<const float>(divisor, blocks, "a divisor per block is wanted"),
                      half ? pointer<const float>(*half, blocks, "a half per block") : nullptr,
                      offset ? pointer<const float>(*offset, blocks, "an offset per block") : nullptr};
    require(e_.offset_kind == OffsetKind::kNone || by.offset, "the offsets are missing");
    const Codes to = codes(out, w);
    run(w, threads, [&](const Kernels& k, const Encoder& e, int64_t first, int64_t last) {
      k.encode(w, a, e, by, first, last, to);
    }, saturates);
  }

  // For every block, which lies in one line, the sum of magnitudes; with divisors, and the number of
  // every code, that of the squared errors.
  void block_sums(const Array& x, const Writable& out, const std::vector<int64_t>& shape,
                  const std::vector<int64_t>& block, const std::optional<Array>& numbers,
                  const std::optional<Array>& divisor, const std::optional<Array>& half,
                  const std::optional<Array>& offset, bool saturates, int threads) const {
    const Weight w = geometry(shape, block);
    const Activations a = lines_of(x, w);
    const int64_t blocks = grid_size(w);
    require(blocks == w.lines * w.grid_length, "a block may not span lines here");
    double* const sums = pointer<double>(out, blocks, "a float64 per block is wanted");
    const auto optional = [&](const std::optional<Array>& grid) {
      return grid ? pointer<const float>(*grid, blocks, "a float32 per block is wanted") : nullptr;
    };
    const Divisors by{optional(divisor), optional(half), optional(offset)};
    const float* const values = numbers ? pointer<const float>(*numbers, 256, "256 numbers") : nullptr;
    require(!values || (by.value && (e_.offset_kind == OffsetKind::kNone || by.offset)),
            "divisors or offsets are missing");
    run(w, threads, [&](const Kernels& k, const Encoder& e, int64_t first, int64_t last) {
      k.block_sums(w, a, e, by, values, first, last, sums);
    }, saturates);
  }

  // Scales and codes of x, whose blocks lie in one line each.
  void quantize(const Array& x, Writable out, Writable scales, const std::vector<int64_t>& shape,
                const std::vector<int64_t>& block, int number, float range, int threads) const {
    const Weight w = geometry(shape, block);
    const Activations a = lines_of(x, w);
    const int64_t blocks = grid_size(w);
    require(blocks == w.lines * w.grid_length, "a block may not span lines here");
    require(number >= 0 && number <= static_cast<int>(Number::kE4M3) && range > 0, "unknown scales");
    Scales to{scales.data(), static_cast<Number>(number), range};
    require(static_cast<int64_t>(scales.size()) == blocks && scales.dtype().bits == bits_of(to.number) &&
                is_contiguous(Array(scales)),
            "a scale per block is wanted");
    const Codes data = codes(out, w);
    run(w, threads, [&](const Kernels& k, const Encoder& e, int64_t first, int64_t last) {
      k.quantize(w, a, e, to, first, last, data);
    });
  }

 private:
  Codes codes(const Writable& out, const Weight& w) const {
    const int64_t total = static_cast<int64_t>(out.size());
    require(out.dtype() == nb::dtype<uint8_t>() && is_contiguous(Array(out)), "codes are contiguous uint8");
    if (!w.lines || !w.length) return {static_cast<uint8_t*>(out.data()), 0};
    require(total % w.lines == 0 && total / w.lines >= ceil_div(w.length * e_.store_bits, 8),
            "the output does not fit");
    return {static_cast<uint8_t*>(out.data()), total / w.lines};
  }

  template <class Task>
  void run(const Weight& w, int threads, const Task& task, bool saturates = false) const {
    nb::gil_scoped_release release;
    if (!w.lines || !w.length) return;
    Encoder e = e_;
    e.midpoints = midpoints_.data();
    e.codes = codes_.data();
    e.midpoint_count = static_cast<int>(midpoints_.size());
    e.saturates = saturates;
    const Kernels& k = *chosen;
    const int64_t step = std::max<int64_t>(1, (1 << 16) / w.length / 16 * 16);
    const int workers = threads_for(w.lines * w.length, threads);
    parallel_for(ceil_div(w.lines, step), workers, [&](int64_t i) {
      task(k, e, i * step, std::min(w.lines, (i + 1) * step));
    });
  }

  Encoder e_;
  std::vector<float> midpoints_;
  std::vector<uint8_t> codes_;
};

// Lowest and highest number of every block, or (low None) the largest magnitude.
void ranges(const Array& x, const std::vector<int64_t>& shape, const std::vector<int64_t>& block,
            std::optional<Writable> low, Writable high, bool saturates, int threads) {
  const Weight w = geometry(shape, block);
  const Activations a = lines_of(x, w);
  const int64_t blocks = grid_size(w);
  float* const lows = low ? pointer<float>(*low, blocks, "a low per block") : nullptr;
  float* const highs = pointer<float>(high, blocks, "a high per block");
  nb::gil_scoped_release release;
  const float infinity = std::numeric_limits<float>::infinity();
  std::fill(highs, highs + blocks, lows ? -infinity : 0.0f);
  if (lows) std::fill(lows, lows + blocks, infinity);
  if (!w.lines || !w.length) return;
  // Tasks that share no row of the grid: lines of one first axis' block stay together.
  const int64_t inner = w.leading ? w.lines / w.extent[0] : 1;
  const int64_t band = w.leading ? w.lead_block[0] * inner : 1;
  const int64_t step = std::max<int64_t>(1, (1 << 16) / w.length / band) * band;
  const int workers = threads_for(w.lines * w.length, threads);
  const Kernels& k = *chosen;
  parallel_for(ceil_div(w.lines, step), workers, [&](int64_t i) {
    k.ranges(w, a, saturates, i * step, std::min(w.lines, (i + 1) * step), lows, highs);
  });
}

bool all_finite(const Array& x, int threads) {
  require(x.ndim() == 2, "two axes are wanted");
  const int line = x.stride(0) == 1 ? 0 : 1;  // either order will do: that of the memory
  const int64_t rows = static_cast<int64_t>(x.shape(1 - line));
  const int64_t columns = static_cast<int64_t>(x.shape(line));
  const Activations a{x.data(), float_of(x), rows, columns, x.stride(1 - line), x.stride(line)};
  nb::gil_scoped_release release;
  if (!rows || !columns) return true;
  std::atomic<bool> finite{true};
  const Kernels& k = *chosen;
  const int64_t step = std::max<int64_t>(1, (1 << 17) / columns);
  const int workers = threads_for(rows * columns, threads, 1 << 17);
  parallel_for(ceil_div(rows, step), workers, [&](int64_t i) {
    if (finite && !k.all_finite(a, i * step, std::min(rows, (i + 1) * step))) finite = false;
  });
  return finite;
}

}  // namespace
}  // namespace pq

NB_MODULE(_native, m) {
  using pq::Matrix;
  nb::set_leak_warnings(false);  // tensors that live until the interpreter ends are no leak
  m.doc() = "Compiled kernels over the canonical bytes. Private: polyquant.backends.native calls it.";
  m.def("targets", &pq::targets, "Instruction sets that this processor has, the fastest first.");
  m.def("target", [] { return std::string(pq::chosen.load()->name); }, "The one in use.");
  m.def("set_target", &pq::set_target, nb::arg("name"), "Use another one, for tests.");
  m.def("num_threads", [] { return pq::num_threads.load(); });
  m.def("set_num_threads", &pq::set_num_threads, nb::arg("count"));
  nb::class_<Matrix>(m, "Matrix", "A stored weight: lines of packed codes and their scales.")
      .def(nb::init<pq::Array, const std::vector<int64_t>&, const std::vector<int64_t>&, int, int,
                    int, bool, const std::vector<uint32_t>&, std::optional<pq::Array>, nb::object,
                    int, std::optional<pq::Array>, nb::object, int, int>(),
           nb::arg("data"), nb::arg("shape"), nb::arg("block"), nb::arg("bits"),
           nb::arg("value_bits"), nb::arg("kind"), nb::arg("is_signed"), nb::arg("minifloat"),
           nb::arg("table").none(), nb::arg("scales"), nb::arg("scale_number"),
           nb::arg("tensor_scale").none(), nb::arg("offsets").none(), nb::arg("offset_number"),
           nb::arg("offset_kind"))
      .def("matmul_codes", &Matrix::matmul_codes, nb::arg("x"), nb::arg("bytes"), nb::arg("out"),
           nb::arg("threads"))
      .def("decode", &Matrix::decode, nb::arg("out"), nb::arg("threads"))
      .def("matmul", &Matrix::matmul, nb::arg("x"), nb::arg("out"), nb::arg("along_k"),
           nb::arg("first_line"), nb::arg("count"), nb::arg("threads"));
  nb::class_<pq::Bytes>(m, "Bytes", "How a weight's codes are bytes for products of integers.")
      .def(nb::init<int, int, int, std::vector<uint8_t>, std::vector<float>, int, float, bool>(),
           nb::arg("bits"), nb::arg("mask"), nb::arg("flip"), nb::arg("table"), nb::arg("powers"),
           nb::arg("bias"), nb::arg("factor"), nb::arg("has_zero_point"));
  nb::class_<pq::Coder>(m, "Coder", "How numbers become codes.")
      .def(nb::init<int, int, int, bool, float, float, int, int, std::vector<float>,
                    std::vector<uint8_t>, int, bool>(),
           nb::arg("code"), nb::arg("value_bits"), nb::arg("store_bits"), nb::arg("extends_sign"),
           nb::arg("low"), nb::arg("high"), nb::arg("mantissa_bits"), nb::arg("bias"),
           nb::arg("midpoints"), nb::arg("codes"), nb::arg("offset_kind"), nb::arg("rounds_first"))
      .def("matmul", &pq::Coder::matmul, nb::arg("x"), nb::arg("block"), nb::arg("range"),
           nb::arg("weight"), nb::arg("bytes"), nb::arg("out"), nb::arg("threads"))
      .def("encode", &pq::Coder::encode, nb::arg("x"), nb::arg("out"), nb::arg("shape"),
           nb::arg("block"), nb::arg("divisor"), nb::arg("half").none(), nb::arg("offset").none(),
           nb::arg("saturates"), nb::arg("threads"))
      .def("block_sums", &pq::Coder::block_sums, nb::arg("x"), nb::arg("out"), nb::arg("shape"),
           nb::arg("block"), nb::arg("numbers").none(), nb::arg("divisor").none(),
           nb::arg("half").none(), nb::arg("offset").none(), nb::arg("saturates"),
           nb::arg("threads"))
      .def("quantize", &pq::Coder::quantize, nb::arg("x"), nb::arg("out"), nb::arg("scales"),
           nb::arg("shape"), nb::arg("block"), nb::arg("number"), nb::arg("range"),
           nb::arg("threads"));
  m.def("ranges", &pq::ranges, nb::arg("x"), nb::arg("shape"), nb::arg("block"),
        nb::arg("low").none(), nb::arg("high"), nb::arg("saturates"), nb::arg("threads"));
  m.def("all_finite", &pq::all_finite, nb::arg("x"), nb::arg("threads"));
  m.def("enqueue_cuda",
        [](uintptr_t function, uintptr_t argument, unsigned x, unsigned y, unsigned z,
           unsigned threads, unsigned shared, uintptr_t stream, bool early) {
          const pq::CudaLaunch given{{x, y, z}, {1, 1, z}, threads, shared, early};
          auto place = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
          return pq::enqueue(given, place(function), place(stream), place(argument));
        },
        nb::call_guard<nb::gil_scoped_release>(),
        "Enqueues a CUDA kernel of one argument: addresses of it and of that, blocks (a cluster "
        "is all along z), threads, bytes of shared memory, the stream, and whether it waits by "
        "itself for the one before. Returns what the driver answers.");
  m.def("keep_cuda_kernel",
        [](const std::string& digest, const nb::bytes& code, const std::string& function,
           size_t argument) {
          pq::keep_cuda_kernel(digest, {code.c_str(), code.size()}, function, argument);
        },
        nb::arg("digest"), nb::arg("code"), nb::arg("function"), nb::arg("argument"));
  m.def("cuda_launch",
        [](int minor) {
          pq::xla::minor_of_xla = minor;
          return nb::capsule(reinterpret_cast<void*>(&pq::cuda_launch));
        },
        nb::arg("minor") = pq::xla::kMinor,
        "The handler of XLA's custom call that launches them, for a minor version of its FFI.");
  m.def("xla_product",
        [](int minor) {
          pq::xla::minor_of_xla = minor;
          return nb::capsule(reinterpret_cast<void*>(&pq::xla_product));
        },
        nb::arg("minor") = pq::xla::kMinor,
        "The handler of XLA's custom call that multiplies on the CPU, for a minor version of its FFI.");
}
