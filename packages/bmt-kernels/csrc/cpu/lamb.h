// What a variant offers for the two passes of a LAMB step.
#pragma once

#include "common/lamb.h"

namespace bmt {

struct LambKernels {
  // The first pass over elements [begin, end) of a row, which are a block: their sums depend on where it begins and
  // ends. By whether the row has room for directions, and by dtypes of weight and gradient.
  LambSums (*moments[2][kDTypes][kDTypes])(const LambRow& row, int64_t begin, int64_t end, const LambScalars& scalars);
  // The second pass, with the tensor's rate, by whether there are directions. stream_copy: store the half-precision copy
  // past the caches.
  void (*update[2][kWeightKinds])(const LambRow& row, int64_t begin, int64_t end, const LambScalars& scalars, float rate,
                               bool stream_copy);
};

}  // namespace bmt
