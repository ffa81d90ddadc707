// What a variant offers for sums of powers.
#pragma once

#include "common/norms.h"

namespace bmt {

struct NormKernels {
  // The sum of |x|^p (for kMaximum: the largest |x|) over the n elements of a block; p is only read for kPowers.
  // NaN if there is a NaN among them.
  double (*block[kNormKinds][kDTypes])(const void* data, int64_t n, double p);
};

}  // namespace bmt
