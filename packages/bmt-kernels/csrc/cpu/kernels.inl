// The CPU loops, compiled once per instruction set. The including file has defined, in this anonymous
// namespace, a vector type Vec with kWidth lanes, operators, square_root, spread, and load/store/stream for each
// storage type, and Wide, such a vector in double precision. No std:: templates here: their instances would be
// shared between the variants.

#include "cpu/storage.inl"
#include "cpu/sums.inl"

#include "cpu/adam.inl"
#include "cpu/norms.inl"
#include "cpu/overflow.inl"
#include "cpu/quantize.inl"
#include "cpu/adam8bit.inl"
#include "cpu/factored.inl"
#include "cpu/cross_entropy.inl"
#include "cpu/lamb.inl"
#include "cpu/packing.inl"

// In the order of struct Kernels.
#define BMT_KERNELS(variant_name)                                                                      \
  {                                                                                                    \
    variant_name, BMT_ADAM_KERNELS, BMT_NORM_KERNELS, BMT_OVERFLOW_KERNELS, BMT_QUANTIZE_KERNELS,      \
        BMT_ADAM8BIT_KERNELS, BMT_FACTORED_KERNELS, BMT_CROSS_ENTROPY_KERNELS, BMT_LAMB_KERNELS,       \
        BMT_PACK_KERNELS                                                                               \
  }
