// What a variant offers for cross entropy.
#pragma once

#include "common/cross_entropy.h"

namespace bmt {

struct CrossEntropyKernels {
  // Of n adjacent logits; weights: theirs, for kWeightedSum.
  RowStatistics (*statistics[kDTypes][kCrossEntropySums])(const void* logits, const float* weights, int64_t n);
  // The gradient of n adjacent logits, in their dtype; it may take their place.
  void (*gradient[kDTypes][kCrossEntropySums])(const void* logits, void* out, const float* weights, int64_t n,
                                               const GradientRow& row);
};

}  // namespace bmt
