// What a variant offers for the Adam step with 8-bit moments.
#pragma once

#include "common/adam8bit.h"

namespace bmt {

struct Adam8bitKernels {
  // Elements [first, last) of a row after count_from_block, where first is a multiple of the block size.
  void (*step[kWeightKinds][kDTypes])(const Adam8bitRow& row, int64_t first, int64_t last, const AdamScalars& scalars);
};

}  // namespace bmt
