// The arithmetic of one LAMB step on one element (or one vector of elements), written once.
//
// A step is two passes over memory: the first moves the moments and adds up the squares of the weights and of the
// directions r, the second computes the same r again and takes the step. Between them the caller turns the sums, of
// all ranks, into a rate for each tensor. Computing r twice takes less time than writing and reading it would, unless
// it stays in the caches in between.
//
// Maths: You et al., "Large Batch Optimization for Deep Learning", arXiv:1904.00962, algorithm 2. V is float, or a
// SIMD vector with + - * / and square_root; the order of the operations is fixed and nothing is contracted, so every
// variant, the CUDA kernels and the reference have the same r. The moments are those of common/adam.h.
#pragma once

#include "common/adam.h"

namespace bmt {

// The weights are at `weight`: a master if there is one, and then the half-precision parameter is `copy`, else 0.
struct LambRow {
  int64_t weight;
  int64_t copy;
  int64_t grad;  // 0 in the second pass
  int64_t exp_avg;
  int64_t exp_avg_sq;
  int64_t numel;
  int64_t index;  // place of the tensor's sums and of its rate
  int64_t kinds;  // dtype of weight | dtype of copy << 8 | dtype of grad << 16
  int64_t direction;  // room for r between the passes, or 0; only the CPU uses it
};
static_assert(sizeof(LambRow) == 9 * sizeof(int64_t), "rows are read from a packed table");

// What the caller of a pass sets.
struct LambSettings {
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double step;  // counted from 1
  double grad_scale;
  bool bias_correction;
};

// What an element is multiplied with: computed in double precision, used in single precision.
struct LambScalars {
  float grad_factor;  // 1 / grad_scale
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float denom_factor;  // 1 / sqrt(1 - beta2^step), or 1
  float eps;
  float direction_factor;  // 1 / (1 - beta1^step), or 1
  float weight_decay;
};

inline LambScalars lamb_scalars(const LambSettings& s) {
  LambScalars r;
  r.grad_factor = static_cast<float>(1.0 / s.grad_scale);
  r.beta1 = static_cast<float>(s.beta1);
  r.one_minus_beta1 = static_cast<float>(1.0 - s.beta1);
  r.beta2 = static_cast<float>(s.beta2);
  r.one_minus_beta2 = static_cast<float>(1.0 - s.beta2);
  r.denom_factor = s.bias_correction ? static_cast<float>(1.0 / sqrt(1.0 - pow(s.beta2, s.step))) : 1.0f;
  r.eps = static_cast<float>(s.eps);
  r.direction_factor = s.bias_correction ? static_cast<float>(1.0 / (1.0 - pow(s.beta1, s.step))) : 1.0f;
  r.weight_decay = static_cast<float>(s.weight_decay);
  return r;
}

// The scalars, spread over the lanes of V.
template <class V>
struct LambFactors {
  V grad_factor, beta1, one_minus_beta1, beta2, one_minus_beta2, denom_factor, eps, direction_factor, weight_decay;
};

template <class V, class Spread>
BMT_INLINE LambFactors<V> spread_factors(const LambScalars& s, Spread spread) {
  return {spread(s.grad_factor),     spread(s.beta1),        spread(s.one_minus_beta1),
          spread(s.beta2),           spread(s.one_minus_beta2), spread(s.denom_factor),
          spread(s.eps),             spread(s.direction_factor), spread(s.weight_decay)};
}

template <class V>
BMT_INLINE void move_moments(V& exp_avg, V& exp_avg_sq, V grad, const LambFactors<V>& f) {
  grad = grad * f.grad_factor;
  exp_avg = exp_avg * f.beta1 + grad * f.one_minus_beta1;
  exp_avg_sq = exp_avg_sq * f.beta2 + (grad * f.one_minus_beta2) * grad;
}

template <class V>
BMT_INLINE V lamb_direction(V weight, V quotient, const LambFactors<V>& f) {
  return quotient * f.direction_factor + weight * f.weight_decay;
}

template <class V>
BMT_INLINE V lamb_direction(V weight, V exp_avg, V exp_avg_sq, const LambFactors<V>& f) {
  return lamb_direction(weight, adam_quotient(exp_avg, exp_avg_sq, f), f);
}

// Over elements: the sum of the squares of the weights, and of the directions.
struct LambSums {
  double weights;
  double directions;
};

}  // namespace bmt
