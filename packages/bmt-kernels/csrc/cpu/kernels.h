// The table of kernels that each instruction-set variant fills in.
#pragma once

#include "cpu/adam.h"
#include "cpu/factored.h"
#include "cpu/overflow.h"

namespace bmt {

struct Kernels {
  const char* name;
  AdamKernels adam;
  OverflowKernels overflow;
  FactoredKernels factored;
};

extern const Kernels kPortableKernels;
#if defined(BMT_X86)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace bmt
