// The Adam step on CUDA. The functions queue their work on the given stream of the current device and do not
// wait for it.
#pragma once

#include <cuda_runtime_api.h>

#include "common/adam.h"

namespace bmt {

// A number that Python passes, or the address on the device of one to be read when the step runs.
enum class NumberType { kFloat32, kFloat64, kInt64 };
struct DeviceNumber {
  const void* address;  // null: the number in AdamSettings counts
  NumberType type;
};

// What a step reads and writes on the device besides its rows. Any of it may be null.
struct AdamExtras {
  const float* found_inf;    // nothing is written where it is not zero
  const float* grad_factor;  // multiplies the gradients
  DeviceNumber lr;
  DeviceNumber step;
  AdamScalars* scalars;  // workspace, needed if lr or step is on the device
  double* delta_stats;   // to [0] and [1] the sums of the directions and of their squares are added
  double* partials;      // workspace of 2 * adam_blocks doubles, needed for delta_stats
};

int64_t adam_blocks(const AdamRow* rows, int64_t count);

cudaError_t adam_rows_cuda(const AdamRow* rows, int64_t count, const AdamSettings& settings, const AdamExtras& extras,
                           cudaStream_t stream);

// Whether the current device can run the kernels that were built.
bool device_is_supported();

}  // namespace bmt
