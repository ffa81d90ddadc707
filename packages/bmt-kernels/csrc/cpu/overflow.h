// What a variant offers for the overflow check.
#pragma once

#include "common/table.h"

namespace bmt {

struct OverflowKernels {
  // Whether any of n elements is infinite or NaN.
  bool (*has_nonfinite[kDTypes])(const void* data, int64_t n);
};

}  // namespace bmt
