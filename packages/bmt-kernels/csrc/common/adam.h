// The arithmetic of one Adam step on one element (or one vector of elements), written once.
//
// V is float, or a SIMD vector with the operators + - * / and a function square_root. The order of the
// operations is fixed and nothing is contracted into a fused multiply-add, so every variant, the CUDA
// kernels and the reference give the same bits.
//
// Maths: Kingma & Ba, "Adam", arXiv:1412.6980, algorithm 1; decoupled decay: Loshchilov & Hutter,
// arXiv:1711.05101. The same formulas in PyTorch: reference/adam.py.
#pragma once

#if !defined(__CUDACC__)
#include <cmath>
#endif

#include "common/inline.h"
#include "common/table.h"

namespace bmt {

// The master weight is `weight` and the half-precision parameter `copy`; without a master, the parameter
// itself is `weight` and `copy` is 0.
struct AdamRow {
  int64_t weight;
  int64_t copy;
  int64_t grad;
  int64_t exp_avg;
  int64_t exp_avg_sq;
  int64_t numel;
  int64_t kinds;  // dtype of weight | dtype of copy << 8 | dtype of grad << 16
};
static_assert(sizeof(AdamRow) == 7 * sizeof(int64_t), "rows are read from a packed table");

// How a row's parameter is stored: which arrays are read and written. One kernel is compiled for each.
enum WeightKind { kFp32, kBf16, kFp16, kFp32CopyBf16, kFp32CopyFp16, kWeightKinds };

template <class Row>
inline int weight_dtype(const Row& row) { return static_cast<int>(row.kinds & 0xff); }

template <class Row>
inline int weight_kind(const Row& row) {
  if (row.copy == 0) return weight_dtype(row);
  return static_cast<DType>((row.kinds >> 8) & 0xff) == DType::kBFloat16 ? kFp32CopyBf16 : kFp32CopyFp16;
}

template <class Row>
inline int grad_kind(const Row& row) { return static_cast<int>((row.kinds >> 16) & 0xff); }

// What the caller of a step sets.
struct AdamSettings {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double step;        // counted from 1
  double grad_scale;
  double hold_steps;  // up to this step the moments move and the weights stay
  bool decoupled;
  bool maximize;
};

// What an element is multiplied with: computed in double precision, used in single precision.
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
  float direction_factor; // 1 / (1 - beta1^step)
  bool decoupled;
  bool update;            // false: the moments move, the weights stay
};

// Without decay, 0 * weight must not turn an infinite weight to NaN.
BMT_INLINE bool decays_weights(const AdamSettings& s) { return s.decoupled || s.weight_decay == 0.0; }

BMT_INLINE AdamScalars adam_scalars(const AdamSettings& s) {
  const double bias_correction1 = 1.0 - pow(s.beta1, s.step);
  const double bias_correction2 = 1.0 - pow(s.beta2, s.step);
  AdamScalars r;
  r.grad_factor = static_cast<float>((s.maximize ? -1.0 : 1.0) / s.grad_scale);
  r.beta1 = static_cast<float>(s.beta1);
  r.one_minus_beta1 = static_cast<float>(1.0 - s.beta1);
  r.beta2 = static_cast<float>(s.beta2);
  r.one_minus_beta2 = static_cast<float>(1.0 - s.beta2);
  r.decay_factor = static_cast<float>(1.0 - s.lr * s.weight_decay);
  r.l2 = static_cast<float>(s.weight_decay);
  r.denom_factor = static_cast<float>(1.0 / sqrt(bias_correction2));
  r.eps = static_cast<float>(s.eps);
  r.step_size = static_cast<float>(s.lr / bias_correction1);
  r.direction_factor = static_cast<float>(1.0 / bias_correction1);
  r.decoupled = decays_weights(s);
  r.update = s.step > s.hold_steps;
  return r;
}

BMT_INLINE float square_root(float x) { return sqrtf(x); }

// The scalars, spread over the lanes of V.
template <class V>
struct AdamFactors {
  V grad_factor, beta1, one_minus_beta1, beta2, one_minus_beta2, decay_factor, l2, denom_factor, eps, step_size,
      direction_factor;
};

template <class V, class Spread>
BMT_INLINE AdamFactors<V> spread_factors(const AdamScalars& s, Spread spread) {
  return {spread(s.grad_factor),     spread(s.beta1),        spread(s.one_minus_beta1), spread(s.beta2),
          spread(s.one_minus_beta2), spread(s.decay_factor), spread(s.l2),              spread(s.denom_factor),
          spread(s.eps),             spread(s.step_size),    spread(s.direction_factor)};
}

template <class V>
BMT_INLINE void adam_moments(V weight, V& exp_avg, V& exp_avg_sq, V grad, const AdamFactors<V>& f, bool decoupled) {
  grad = grad * f.grad_factor;
  if (!decoupled) grad = grad + weight * f.l2;
  exp_avg = exp_avg * f.beta1 + grad * f.one_minus_beta1;
  exp_avg_sq = exp_avg_sq * f.beta2 + (grad * f.one_minus_beta2) * grad;
}

template <class V, class Factors>
BMT_INLINE V adam_denominator(V root, const Factors& f) {
  return root * f.denom_factor + f.eps;
}

template <class V, class Factors>
BMT_INLINE V adam_quotient(V exp_avg, V exp_avg_sq, const Factors& f) {
  return exp_avg / adam_denominator(square_root(exp_avg_sq), f);
}

template <class V>
BMT_INLINE void adam_weight(V& weight, V quotient, const AdamFactors<V>& f, bool decoupled) {
  if (decoupled) weight = weight * f.decay_factor;
  weight = weight - quotient * f.step_size;
}

// Returns the direction of the step, m / (1 - beta1^step) / (sqrt(v) / sqrt(1 - beta2^step) + eps), for statistics.
// If the result is not used, and update is the constant false, the compiler eliminates its computation.
template <class V>
BMT_INLINE V adam_element(V& weight, V& exp_avg, V& exp_avg_sq, V grad, const AdamFactors<V>& f, bool decoupled,
                          bool update) {
  adam_moments(weight, exp_avg, exp_avg_sq, grad, f, decoupled);
  const V quotient = adam_quotient(exp_avg, exp_avg_sq, f);
  if (update) adam_weight(weight, quotient, f, decoupled);
  return quotient * f.direction_factor;
}

}  // namespace bmt
