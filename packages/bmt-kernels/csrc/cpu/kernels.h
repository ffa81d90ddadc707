// The table of kernels that each instruction-set variant fills in.
#pragma once

#include <cstdint>

#include "common/adam.h"
#include "common/table.h"

namespace bmt {

struct Kernels {
  const char* name;
  // One Adam step on elements [begin, end) of a row.
  void (*adam[kWeightKinds][kDTypes])(const AdamRow& row, int64_t begin, int64_t end, const AdamScalars& scalars);
  // Whether any of n elements is infinite or NaN.
  bool (*has_nonfinite[kDTypes])(const void* data, int64_t n);
};

extern const Kernels kPortableKernels;
#if defined(BMT_X86)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace bmt
