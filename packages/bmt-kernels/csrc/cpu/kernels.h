// The table of kernels that each instruction-set variant fills in.
#pragma once

#include "cpu/adam.h"
#include "cpu/adam8bit.h"
#include "cpu/cross_entropy.h"
#include "cpu/factored.h"
#include "cpu/lamb.h"
#include "cpu/norms.h"
#include "cpu/overflow.h"
#include "cpu/packing.h"
#include "cpu/quantize.h"

namespace bmt {

struct Kernels {
  const char* name;
  AdamKernels adam;
  NormKernels norms;
  OverflowKernels overflow;
  QuantizeKernels quantize;
  Adam8bitKernels adam8bit;
  FactoredKernels factored;
  CrossEntropyKernels cross_entropy;
  LambKernels lamb;
  PackKernels packing;
};

extern const Kernels kPortableKernels;
#if defined(BMT_X86)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace bmt
