// What a p-norm adds up, written once. Every |x|^p is computed in double precision: squares of fp32 numbers are exact
// there and do not overflow.
#pragma once

#if !defined(__CUDACC__)
#include <cmath>
#endif

#include "common/inline.h"
#include "common/table.h"

namespace bmt {

// p = 1, p = 2, any other p > 0, and p = infinity, whose "sum" is the largest magnitude.
enum NormKind { kMagnitudes, kSquares, kPowers, kMaximum, kNormKinds };

BMT_INLINE NormKind norm_kind(double p) {
  if (p == 1.0) return kMagnitudes;
  if (p == 2.0) return kSquares;
  return p > 1.7976931348623157e308 ? kMaximum : kPowers;
}

template <int kKind>
BMT_INLINE double norm_term(double x, double p) {
  if (kKind == kSquares) return x * x;
  const double magnitude = fabs(x);
  return kKind == kPowers ? pow(magnitude, p) : magnitude;
}

// One partial result put to another; NaN stays.
template <int kKind>
BMT_INLINE double norm_combine(double a, double b) {
  if (kKind != kMaximum) return a + b;
  return b > a || b != b ? b : a;
}

}  // namespace bmt
