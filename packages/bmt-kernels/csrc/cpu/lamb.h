// What a variant offers for the two passes of a LAMB step. Either computes the directions, or the first keeps them and
// the second reads them.
#pragma once

#include "common/lamb.h"

namespace bmt {

struct LambKernels {
  // The first pass over elements [begin, end) of a row, which are a block: their sums depend on where it begins and
  // ends. By whether directions are kept (those of the whole row: directions[i] is element i's), and by dtypes of
  // weight and gradient.
  LambSums (*moments[2][kDTypes][kDTypes])(const LambRow& row, int64_t begin, int64_t end, const LambScalars& scalars,
                                           float* directions);
  // The second pass, with the tensor's rate, by whether directions were kept. stream_copy: store the half-precision
  // copy past the caches.
  void (*update[2][kWeightKinds])(const LambRow& row, int64_t begin, int64_t end, const LambScalars& scalars,
                                  float rate, bool stream_copy, const float* directions);
};

}  // namespace bmt
