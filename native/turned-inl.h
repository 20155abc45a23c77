// Some rows of codes times a weight of 4 bits: 16 lines at once, each in a lane of its own.
//
// 64 bytes of every line are turned by fours, 16 vectors with 128 codes of each, so that no sum is one
// of lanes. x enters as fours of codes which all lanes get. Nothing decoded is ever stored: 8 rows
// share what is looked up in registers. For 16 rows times NF4 that is 1.5 ms where panels, which lie
// in the second cache, took 2.0.
#pragma once

#if defined(PQ_AVX512)

namespace pq::PQ_TARGET {

constexpr int kTurned = 16, kMostTurned = 16;  // lines at once, and rows at most
// Bytes of a line that are asked for ahead, or as many of the line that follows in its lane.
constexpr int64_t kTurnedAhead = 512;

PQ_INLINE bool is_turned(const Weight8& kind, int64_t rows) {
  return kind.bits == 4 && !kind.has_zero_point && rows <= kMostTurned;
}

// Number j of each of 16 rows as lanes of vector j: quarters of rows come from memory in place, which
// leaves half the shuffles.
PQ_INLINE void turn(const uint8_t* const (&rows)[16], int64_t byte, void* to) {
  const auto quarter = [&](I before, int row, int at) PQ_INLINE_LAMBDA {
    const __m128i some = _mm_loadu_si128((const __m128i*)(rows[row] + byte + at));
    return _mm512_mask_broadcast_i32x4(before, static_cast<__mmask16>(0xf << (row / 4 * 4)), some);
  };
#pragma GCC unroll 4
  for (int at = 0; at < 64; at += 16) {
    I v[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      v[i] = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)(rows[i] + byte + at)));
      v[i] = quarter(quarter(quarter(v[i], 4 + i, at), 8 + i, at), 12 + i, at);
    }
    const I a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
    const I c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
    I* const four = static_cast<I*>(to) + at / 4;
    _mm512_storeu_si512(four, _mm512_unpacklo_epi64(a, c));
    _mm512_storeu_si512(four + 1, _mm512_unpackhi_epi64(a, c));
    _mm512_storeu_si512(four + 2, _mm512_unpacklo_epi64(b, d));
    _mm512_storeu_si512(four + 3, _mm512_unpackhi_epi64(b, d));
  }
}

// Of 8 codes the even ones, then the odd ones: as the low and the high nibbles of 4 bytes.
struct EvenOdd {
  alignas(64) uint8_t at[64] = {};
  constexpr EvenOdd() {
    for (int i = 0; i < 64; ++i) at[i] = static_cast<uint8_t>(i / 8 * 8 + i % 4 * 2 + i % 8 / 4);
  }
};
inline constexpr EvenOdd kEvenOdd;

// Rows that x is laid out for: a multiple of 4.
PQ_INLINE int64_t turned_rows(int64_t rows) { return (rows + 3) / 4 * 4; }

// x: codes [four][rows][4], scales [unit][rows], and minus the sums of each unit's codes, times the
// weight's bias. Rows are filled up with zeros.
inline void pack_turned(const Codes8& x, const Weight8& kind, int64_t rows, const Panels8& to) {
  const int64_t filled = turned_rows(rows);
  const __mmask16 lanes = first(static_cast<int>(filled));
  const I order = _mm512_load_si512(kEvenOdd.at), by = set1_int(-kind.bias);
  const I ones = _mm512_set1_epi8(1);
  alignas(64) uint8_t ordered[16][64] = {};
  I v[16];
  const uint8_t* at[16];
  for (int m = 0; m < 16; ++m) at[m] = ordered[m];
  for (int64_t k = 0; k < x.padded; k += 64) {
    for (int64_t m = 0; m < rows; ++m) {
      const I codes = _mm512_loadu_si512(x.codes + m * x.padded + k);
      _mm512_store_si512(ordered[m], _mm512_permutexvar_epi8(order, codes));
    }
    turn(at, 0, v);
    for (int unit = 0; unit < 2; ++unit) {
      I total = set1_int(0);
      for (int four = 0; four < 8; ++four) {
        const I codes = v[unit * 8 + four];
        total = _mm512_dpbusd_epi32(total, ones, codes);
        _mm512_mask_storeu_epi32(to.codes + (k / 4 + unit * 8 + four) * filled * 4, lanes, codes);
      }
      const int64_t sum = (k / kUnit + unit) * filled;
      _mm512_mask_storeu_epi32(to.sums + sum, lanes, mul_int(total, by));
      for (int64_t m = 0; m < filled; ++m)
        to.scales[sum + m] = m < rows ? x.scales[m * x.units + k / kUnit + unit] : 0.0f;
    }
  }
}

// sums[m, 0..15] += the products of 16 lines and kRows of x's kStride rows, over `units` units.
// turned: the weight's stored bytes. scales: of the lines, [unit][16].
template <int kStride, int kRows, class B>
PQ_INLINE void turned_units(const B& bytes, const float* powers, const I* turned,
                            const float* scales, const uint8_t* x, const float* x_scales,
                            const int32_t* x_sums, int64_t units, float* sums) {
  // Few sums are kept twice, so that one need not wait for the other.
  constexpr int kTwice = B::kTables * kRows <= 8 ? 2 : 1;
  for (int64_t u = 0; u < units; ++u) {
    I part[kTwice][B::kTables][kRows];
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const I start = set1_int(x_sums[u * kStride + m]);
#pragma GCC unroll 3
      for (int t = 0; t < B::kTables; ++t) {
        part[0][t][m] = start;
        if (kTwice == 2) part[kTwice - 1][t][m] = set1_int(0);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const auto fields = bytes.codes(_mm512_load_si512(turned + u * 4 + i));
      typename B::Codes tables[B::kTables];
#pragma GCC unroll 3
      for (int t = 0; t < B::kTables; ++t) tables[t] = bytes.mapped(fields, t);
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j)
#pragma GCC unroll 8
        for (int m = 0; m < kRows; ++m) {
          int32_t four;
          std::memcpy(&four, x + ((u * 8 + i * 2 + j) * kStride + m) * 4, 4);
          const I right = set1_int(four);
#pragma GCC unroll 3
          for (int t = 0; t < B::kTables; ++t) {
            I& sum = part[j % kTwice][t][m];
            sum = _mm512_dpbusd_epi32(sum, tables[t].at[j], right);
          }
        }
    }
    const F left = load(scales + u * kTurned);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      F total;
#pragma GCC unroll 3
      for (int t = 0; t < B::kTables; ++t) {
        const I all = kTwice == 2 ? add_int(part[0][t][m], part[kTwice - 1][t][m]) : part[0][t][m];
        total = t ? fma(to_float(all), set1(powers[t]), total) : to_float(all);
      }
      float* const sum = sums + m * kTurned;
      store(sum, fma(mul(total, left), set1(x_scales[u * kStride + m]), load(sum)));
    }
  }
}

template <int kStride, class B>
inline bool turned_lines(const B& bytes, const Weight& w, const Weight8& kind, const Codes8& x,
                         const Panels8& panel, int64_t rows, int64_t first_line, int64_t first,
                         int64_t last, float* scratch, const Output& y) {
  constexpr int kAtOnce = B::kTables > 2 ? 4 : 8;  // rows: registers hold no more sums
  const int64_t units = x.units, stride = (units + 15) / 16 * 16;
  float *const sums = scratch, *const scales = sums + kStride * kTurned;
  float* const by_line = scales + stride * kTurned;
  float* const one_line = by_line + kTurned * stride + 16;  // a line may be written too far
  alignas(64) I turned[16];
  const int64_t line_codes = (w.length + 1) / 2;
  for (int64_t n = first; n < last; n += kTurned) {
    const int64_t lines = min64(kTurned, last - n);
    const uint8_t *at[kTurned], *scales_at[kTurned];
    for (int64_t i = 0; i < kTurned; ++i) {  // where there are fewer, the last one again
      const int64_t line = first_line + n + min64(i, lines - 1), row = w.grid_row(line);
      at[i] = w.data + line * w.line_bytes;
      ask_ahead(w, w.scale, row, kTurned);
      if (!unit_scales(w, row, units, one_line, by_line + i * stride)) return false;
      scales_at[i] = reinterpret_cast<const uint8_t*>(by_line + i * stride);
    }
    for (int64_t u = 0; u < units; u += 16) turn(scales_at, u * 4, scales + u * kTurned);
    std::memset(sums, 0, 4 * kStride * kTurned);
    for (int64_t u = 0; u < units; u += 4) {
      const int64_t byte = u * kUnit / 2;
      if (byte + 64 <= line_codes) {
        const int64_t here = byte + kTurnedAhead, beyond = here - w.line_bytes;
        const int64_t ahead = beyond < 0 ? here : beyond + kTurned * w.line_bytes;
#pragma GCC unroll 16
        for (int i = 0; i < kTurned; ++i) prefetch(at[i] + ahead);
        turn(at, byte, turned);
      } else {
        alignas(64) uint8_t ends[kTurned][64] = {};
        const uint8_t* ends_at[kTurned];
        for (int i = 0; i < kTurned; ++i) {
          std::memcpy(ends[i], at[i] + byte, static_cast<size_t>(line_codes - byte));
          ends_at[i] = ends[i];
        }
        turn(ends_at, 0, turned);
      }
      const auto run = [&](auto count, int64_t m) PQ_INLINE_LAMBDA {
        const int64_t in_x = u * kStride + m;
        turned_units<kStride, decltype(count)::value>(
            bytes, kind.powers, turned, scales + u * kTurned,
            panel.codes + (u * kUnit * kStride + m * 4), panel.scales + in_x, panel.sums + in_x,
            min64(4, units - u), sums + m * kTurned);
      };
      int64_t m = 0;
      for (; m + kAtOnce <= kStride; m += kAtOnce) run(Constant<kAtOnce>(), m);
      if (m < kStride) run(Constant<4>(), m);
    }
    for (int64_t m = 0; m < rows; ++m) {
      alignas(64) float out[kTurned];
      store(out, mul(load(sums + m * kTurned), set1(kind.factor)));
      write_row(out, lines, y, m * y.row_stride + n);
    }
  }
  return true;
}

// -- as many rows as there are, by what is quickest --------------------------------------------

inline void pack_rows8(const Codes8& x, const Weight8& kind, int64_t rows, int64_t first,
                       int64_t last, const Panels8& to) {
  if (is_turned(kind, rows)) return pack_turned(x, kind, rows, to);
  pack_panels8(x, kind, rows, first, last, to);
}

// scratch: see panel8, which takes more.
inline bool rows8(const Weight& w, const Weight8& kind, const Codes8& x, const Panels8& panels,
                  int64_t rows, int64_t first_line, int64_t first, int64_t last, float* scratch,
                  const Output& y) {
  [[maybe_unused]] const FlushSubnormals mode;
  if (!is_turned(kind, rows))
    return panel8(w, kind, x, panels, rows, first_line, first, last, scratch, y);
  return with_bytes8(kind, [&](const auto& bytes) {
    if constexpr (std::decay_t<decltype(bytes)>::kParts == 2) {
      const auto run = [&](auto stride) {
        return turned_lines<decltype(stride)::value>(bytes, w, kind, x, panels, rows, first_line,
                                                     first, last, scratch, y);
      };
      if (rows <= 4) return run(Constant<4>());
      if (rows <= 8) return run(Constant<8>());
      return rows <= 12 ? run(Constant<12>()) : run(Constant<16>());
    }
    return false;  // codes of 4 bits have two parts
  });
}

}  // namespace pq::PQ_TARGET

#endif
