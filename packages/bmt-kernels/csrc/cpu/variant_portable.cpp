// Plain C++, for every processor; the compiler vectorises it for the platform's baseline.
#include "common/half.h"
#include "cpu/kernels.h"

#define BMT_VECTOR 0
#define BMT_PERMUTES 0

namespace {
#include "cpu/kernels.inl"
}  // namespace

const bmt::Kernels bmt::kPortableKernels = BMT_KERNELS("portable");
