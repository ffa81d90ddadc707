// The arithmetic of one Adam step on one element (or one vector of elements), written once.
//
// V is float, or a SIMD vector with the operators + - * / and a function square_root. The order of the
// operations is fixed and nothing is contracted into a fused multiply-add, so every variant, the CUDA
// kernels and reference.py give the same bits.
//
// Maths: Kingma & Ba, "Adam", arXiv:1412.6980, algorithm 1; decoupled decay: Loshchilov & Hutter,
// arXiv:1711.05101. adam.py computes the scalars in double precision.
#pragma once

#if !defined(__CUDACC__)
#include <cmath>
#endif

#include "common/inline.h"

namespace bmt {

struct AdamScalars {
  float grad_factor;      // 1 / grad_scale, negative to maximize
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float decay_factor;     // 1 - lr * weight_decay, used if decoupled
  float l2;               // weight_decay, used if not decoupled
  float denom_factor;     // 1 / sqrt(1 - beta2^step)
  float eps;
  float step_size;        // lr / (1 - beta1^step)
  bool decoupled;
  bool update;            // false: the moments move, the weights stay
};

BMT_INLINE float square_root(float x) { return sqrtf(x); }

// The scalars, spread over the lanes of V.
template <class V>
struct AdamFactors {
  V grad_factor, beta1, one_minus_beta1, beta2, one_minus_beta2, decay_factor, l2, denom_factor, eps, step_size;
};

template <class V, class Spread>
BMT_INLINE AdamFactors<V> spread_factors(const AdamScalars& s, Spread spread) {
  return {spread(s.grad_factor),     spread(s.beta1),        spread(s.one_minus_beta1), spread(s.beta2),
          spread(s.one_minus_beta2), spread(s.decay_factor), spread(s.l2),              spread(s.denom_factor),
          spread(s.eps),             spread(s.step_size)};
}

template <class V>
BMT_INLINE void adam_element(V& weight, V& exp_avg, V& exp_avg_sq, V grad, const AdamFactors<V>& f, bool decoupled,
                             bool update) {
  grad = grad * f.grad_factor;
  if (!decoupled) grad = grad + weight * f.l2;
  exp_avg = exp_avg * f.beta1 + grad * f.one_minus_beta1;
  exp_avg_sq = exp_avg_sq * f.beta2 + (grad * f.one_minus_beta2) * grad;
  if (!update) return;
  if (decoupled) weight = weight * f.decay_factor;
  const V denominator = square_root(exp_avg_sq) * f.denom_factor + f.eps;
  weight = weight - (exp_avg / denominator) * f.step_size;
}

}  // namespace bmt
