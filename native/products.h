// What is computed with a stored weight, shared out over the pool: for Python's side and for XLA's.
// Whatever does not fit is refused by std::invalid_argument.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "targets.h"
#include "weight.h"

namespace pq {

// The instruction set in use, and how many threads.
extern std::atomic<const Kernels*> chosen;
extern std::atomic<int> num_threads;
constexpr int kMostThreads = 1024;

// Threads for so much work, where the caller asked for `threads` (0: no wish).
int threads_for(int64_t work, int threads, int64_t least = 1 << 16);

void require(bool holds, const char* what);
int64_t product_of(const int64_t* extents, int count);
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Floats on a cache line's boundary that a thread keeps for its next call.
class Scratch {
 public:
  float* floats(int64_t count) {
    if (count > size_) {
      data_.reset();
      data_.reset(static_cast<float*>(::operator new(static_cast<size_t>(count) * 4, std::align_val_t(64))));
      size_ = count;
    }
    return data_.get();
  }
  void forget_if_large() {
    if (size_ > (16 << 20)) data_.reset(), size_ = 0;
  }

 private:
  struct Free {
    void operator()(float* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  std::unique_ptr<float, Free> data_;
  int64_t size_ = 0;
};

// A weight's lines, blocks and rows of the grid.
Weight geometry(const std::vector<int64_t>& shape, const std::vector<int64_t>& block);

// What codes mean, as numbers. minifloat: its six (see Minifloat), where the kind is one.
struct Meaning {
  int bits, value_bits, kind;
  bool is_signed;
  int offset_kind;
  std::vector<uint32_t> minifloat;
};
void set_meaning(Weight* w, const Meaning& given);
inline bool has_table(const Weight& w) {
  return w.kind == Kind::kTable16 || w.kind == Kind::kTable256;
}

// Scales or offsets of a weight: numbers that lie side by side, or those of another weight.
constexpr int kMostLevels = 8;  // decoding nests as deep as scales do
Number number_of(int number);
inline int bits_of(Number number) {
  return number == Number::kF32 ? 32 : number <= Number::kBF16 ? 16 : 8;
}

void decode(const Weight& w, const Output& y, int threads);

// y (m, n) = x (m, k) @ the lines [first, first + count): along k, or along n.
void multiply(const Weight& w, const Activations& x, const Output& y, bool along_k, int64_t first,
              int64_t count, int threads);

// y (m, n) = x @ w, transposed, by products of integers; false where a scale is too large for them,
// or float32 is as fast.
bool has_codes_kernel(const Weight8& kind, int64_t rows);
bool multiply_codes(const Weight& w, const Weight& x, const Weight8& kind, const Output& y,
                    int threads);

}  // namespace pq
