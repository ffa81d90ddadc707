// What a variant offers for the Adam step.
#pragma once

#include "common/adam.h"

namespace bmt {

// Over the elements of a block: the sum of their directions, and of the squares of these.
struct DirectionSums {
  double sum;
  double squares;
};

struct AdamKernels {
  // One Adam step on elements [begin, end) of a row. stream_copy: store the half-precision copy past the caches.
  void (*step[kWeightKinds][kDTypes])(const AdamRow& row, int64_t begin, int64_t end, const AdamScalars& scalars,
                                      bool stream_copy);
  // The same with statistics. The elements are a block: their sums depend on where it begins and ends.
  DirectionSums (*step_and_sums[kWeightKinds][kDTypes])(const AdamRow& row, int64_t begin, int64_t end,
                                                        const AdamScalars& scalars);
};

}  // namespace bmt
