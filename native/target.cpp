// The kernels of one instruction set: compiled once for each, with its own flags and PQ_TARGET.
#if defined(PQ_AVX512)
#include "simd_avx512.h"
#elif defined(PQ_AVX2)
#include "simd_avx2.h"
#elif defined(PQ_NEON)
#include "simd_neon.h"
#else
#include "simd_generic.h"
#endif

#include "decode-inl.h"
#include "products-inl.h"
#include "quantize-inl.h"
#include "integers-inl.h"
#include "turned-inl.h"

#define PQ_TEXT_(name) #name
#define PQ_TEXT(name) PQ_TEXT_(name)

namespace pq::PQ_TARGET {

extern const Kernels kKernels;
const Kernels kKernels = {
    PQ_TEXT(PQ_TARGET),
    kWidth,
    kDotRows,
    kPanelLines,
    kPanelDepth,
    kPanelColumns,
    decode,
    pack_rows,
    pack_panels,
    dot,
    panel_rows,
    panel_columns,
    step8,
    pack_codes,
    pack_steps,
    dot8,
#if defined(PQ_AVX512)
    pack_rows8,
    rows8,
#else
    nullptr,
    nullptr,
#endif
    all_finite,
    ranges,
    encode,
    quantize,
    block_sums,
};

}  // namespace pq::PQ_TARGET
