#include "xla_product.h"

#include <list>
#include <stdexcept>
#include <vector>

#include "products.h"
#include "xla_frame.h"

namespace pq {
namespace {

int bytes_of(int dtype) {
  switch (dtype) {
    case xla::kF32: return 4;
    case xla::kF16:
    case xla::kBF16: return 2;
    case xla::kU8: return 1;
    default: throw std::invalid_argument("a buffer is of another dtype");
  }
}

Float float_of(int dtype) {
  require(dtype == xla::kF32 || dtype == xla::kF16 || dtype == xla::kBF16, "no such dtype");
  return dtype == xla::kF32 ? Float::kF32 : dtype == xla::kF16 ? Float::kF16 : Float::kBF16;
}

// The facts one after the other, and the weight that they tell of.
class Reader {
 public:
  Reader(const xla::Frame& frame, xla::Numbers facts) : frame_(frame), facts_(facts) {}

  int64_t next() {
    require(at_ < facts_.size, "the facts end too early");
    return facts_[at_++];
  }
  bool is_at_end() const { return at_ == facts_.size; }

  const xla::Buffer& buffer(int64_t number) const {
    const xla::Buffer* found = xla::buffer_of(frame_, number);
    require(found && found->rank >= 0 && (found->rank == 0 || found->dims), "there is no such buffer");
    return *found;
  }

  // An operand's first byte, which has so many elements of so many bytes.
  const uint8_t* operand(int64_t number, int64_t elements, int bytes) const {
    const xla::Buffer& found = buffer(number);
    require(number < frame_.operands.count, "a weight's arrays are operands");
    require(bytes_of(found.dtype) == bytes && count_of(found) == elements,
            "an array does not fit the weight");
    require(found.data || !elements, "an array is missing");
    return static_cast<const uint8_t*>(found.data);
  }

  static int64_t count_of(const xla::Buffer& buffer) {
    return product_of(buffer.dims, static_cast<int>(buffer.rank));
  }

  const Weight& weight(int depth = 0) {
    require(depth <= kMostLevels, "scales of scales of scales: too many levels");
    const std::vector<int64_t> shape = several(), block = several();
    Weight& w = weights_.emplace_back(geometry(shape, block));
    Meaning meaning{};
    meaning.bits = small(), meaning.value_bits = small(), meaning.kind = small();
    meaning.is_signed = next() != 0;
    meaning.offset_kind = small();
    for (int i = 0; i < 6; ++i) meaning.minifloat.push_back(static_cast<uint32_t>(next()));
    set_meaning(&w, meaning);
    w.line_bytes = ceil_div(w.length * w.bits, 8);
    codes(&w, next());
    const int64_t table = next(), whole = next();
    if (has_table(w)) {
      const int64_t entries = int64_t{1} << w.value_bits;
      w.table = reinterpret_cast<const float*>(operand(table, entries, 4));
    }
    w.scale = grid(w, depth);
    if (whole >= 0) w.scale.tensor_scale = reinterpret_cast<const float*>(operand(whole, 1, 4));
    if (w.offset_kind != OffsetKind::kNone) w.offset = grid(w, depth);
    return w;
  }

 private:
  int small() {
    const int64_t found = next();
    require(found >= 0 && found < 256, "a fact is out of range");
    return static_cast<int>(found);
  }

  std::vector<int64_t> several() {
    std::vector<int64_t> found(static_cast<size_t>(small()));
    for (int64_t& each : found) each = next();
    return found;
  }

  // A line's bytes may be more than its codes take.
  void codes(Weight* w, int64_t number) {
    const xla::Buffer& found = buffer(number);
    require(found.rank >= 1 && w->lines > 0 && w->length > 0, "the weight is empty");
    const int64_t bytes = found.dims[found.rank - 1];
    require(bytes >= w->line_bytes, "too few bytes of codes");
    int64_t total = 0;
    require(!__builtin_mul_overflow(w->lines, bytes, &total), "the extents are too large");
    w->data = operand(number, total, 1);
    w->line_bytes = bytes;
    w->size_bytes = static_cast<size_t>(total);
  }

  Grid grid(const Weight& w, int depth) {
    Grid made;
    const int number = small();
    int64_t blocks = 0;
    require(!__builtin_mul_overflow(w.grid_rows, w.grid_length, &blocks), "the blocks are too many");
    if (number == static_cast<int>(Number::kNested)) {
      made.number = Number::kNested;
      made.nested = &weight(depth + 1);
      require(made.nested->lines == w.grid_rows && made.nested->length == w.grid_length,
              "the scales do not fit the blocks");
      return made;
    }
    made.number = number_of(number);
    made.data = operand(next(), blocks, bits_of(made.number) / 8);
    made.size = blocks;
    return made;
  }

  const xla::Frame& frame_;
  xla::Numbers facts_;
  size_t at_ = 0;
  std::list<Weight> weights_;  // they point at each other
};

void run(const xla::Frame& frame, xla::Numbers facts) {
  Reader reader(frame, facts);
  const bool along_k = reader.next() != 0;
  const Weight& w = reader.weight();
  require(reader.is_at_end(), "the facts go on too long");
  require(frame.operands.count >= 1 && frame.results.count == 1, "one result is wanted");
  const xla::Buffer& x = reader.buffer(0);
  const xla::Buffer& y = reader.buffer(frame.operands.count);
  require(x.rank == 3 && y.rank == 3, "x and the result have three axes");
  const int64_t batch = x.dims[0], m = x.dims[1], k = x.dims[2], n = y.dims[2];
  require(batch >= 1 && m >= 1 && k >= 1 && n >= 1, "an extent is zero");
  require(y.dims[0] == batch && y.dims[1] == m, "the result does not fit x");
  const int64_t lines = along_k ? n : k;
  require(w.lines % batch == 0 && w.lines / batch == lines && w.length == (along_k ? k : n),
          "x and the result do not fit the weight");
  for (const xla::Buffer* each : {&x, &y})
    require(Reader::count_of(*each) < (int64_t{1} << 60), "the extents are too large");
  require(x.data && y.data, "an array is missing");
  const int64_t x_bytes = m * k * bytes_of(x.dtype), y_bytes = m * n * bytes_of(y.dtype);
  const Float x_type = float_of(x.dtype), y_type = float_of(y.dtype);
  for (int64_t i = 0; i < batch; ++i) {
    const Activations a{static_cast<const char*>(x.data) + i * x_bytes, x_type, m, k, k, 1};
    const Output to{static_cast<char*>(y.data) + i * y_bytes, y_type, n};
    multiply(w, a, to, along_k, i * lines, lines, 0);
  }
}

}  // namespace

xla::Error* xla_product(xla::Frame* frame) {
  return xla::handle(frame, 0, [](const xla::Frame& frame) -> xla::Error* {
    const xla::Attributes& given = frame.attributes;
    xla::Numbers facts;
    const bool has_facts = xla::is_readable(given) && given.count == 1 &&
                           xla::is_named(given.names[0], "facts") &&
                           xla::read_numbers(given, 0, &facts);
    if (!has_facts) return xla::error_of(frame.api, xla::refuse("The custom call takes facts alone."));
    try {
      run(frame, facts);
    } catch (const std::invalid_argument& error) {
      const std::string what = std::string("The product's custom call is refused: ") + error.what() + ".";
      return xla::error_of(frame.api, xla::refuse(what.c_str()));
    }
    return nullptr;
  });
}

}  // namespace pq
