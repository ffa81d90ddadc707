// e^x in single precision, written once.
//
// V is float, or a SIMD vector with the operators + - * and the functions constant, maximum, minimum and
// power_of_two. Within 2 ulp of the exact value; subnormal results are rounded once; -inf gives
// 0, too large an x infinity, NaN stays NaN.
#pragma once

#if !defined(__CUDACC__)
#include <cmath>
#endif

#include "common/half.h"

namespace bmt {

BMT_INLINE float constant(float, float value) { return value; }

// Of a NaN and a number, the second argument, as the vector instructions have it.
BMT_INLINE float maximum(float a, float b) { return a > b ? a : b; }
BMT_INLINE float minimum(float a, float b) { return a < b ? a : b; }

// 2^k, -126 <= k <= 127, for x = 1.5 * 2^23 + k: its lowest bits are k in two's complement.
BMT_INLINE float power_of_two(float x) { return bits_float((float_bits(x) << 23) + 0x3f800000u); }

template <class V>
BMT_INLINE V exponential_polynomial(V x) {
  const auto c = [&](float value) { return constant(x, value); };
  // Beyond these bounds the result is 0 and infinity as it is at them.
  x = minimum(c(89.0f), maximum(c(-104.0f), x));
  // x = 2 k ln 2 + r with |r| <= ln 2. Adding 1.5 * 2^23 rounds to an integer, and subtracting it again is exact; so
  // is k times the first part of 2 ln 2, which has few bits.
  const V shifted = x * c(0x1.715476p-1f) + c(0x1.8p23f);
  const V k = shifted - c(0x1.8p23f);
  const V r = (x - k * c(0x1.63p0f)) - k * c(-0x1.bd0106p-12f);
  // e^r = 1 + r + r^2 q(r): the polynomial of least relative error, 1.5e-8, for this interval.
  V q = c(0x1.9b48f8p-13f);
  q = q * r + c(0x1.71bd8p-10f);
  q = q * r + c(0x1.11284ep-7f);
  q = q * r + c(0x1.554a04p-5f);
  q = q * r + c(0x1.55550ep-3f);
  q = q * r + c(0x1.00000cp-1f);
  const V y = (r * r * q + r) + c(1.0f);
  // In two factors: 2^2k itself may be too small or too large for a float.
  const V scale = power_of_two(shifted);
  return y * scale * scale;
}

template <class V>
BMT_INLINE V exponential(V x) {
#if defined(__CUDA_ARCH__)
  // With its hardware exponential (error 1 ulp) the GPU waits for memory; the polynomial would make it wait for itself.
  return expf(x);
#else
  return exponential_polynomial(x);
#endif
}

}  // namespace bmt
