// What a variant offers for the Adam step.
#pragma once

#include "common/adam.h"

namespace bmt {

struct AdamKernels {
  // One Adam step on elements [begin, end) of a row.
  void (*step[kWeightKinds][kDTypes])(const AdamRow& row, int64_t begin, int64_t end, const AdamScalars& scalars);
};

}  // namespace bmt
