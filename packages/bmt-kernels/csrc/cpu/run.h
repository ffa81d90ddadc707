// From tables of rows to the kernels of one variant: splitting the work over threads.
#pragma once

#include "cpu/kernels.h"

namespace bmt {

void adam_rows(const Kernels& kernels, const AdamRow* rows, int64_t count, const AdamScalars& scalars, int threads);

bool any_nonfinite(const Kernels& kernels, const DataRow* rows, int64_t count, int threads);

}  // namespace bmt
