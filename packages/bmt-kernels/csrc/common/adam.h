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
inline int weight_kind(const Row& row) {
  if (row.copy == 0) return static_cast<int>(row.kinds & 0xff);
  return static_cast<DType>((row.kinds >> 8) & 0xff) == DType::kBFloat16 ? kFp32CopyBf16 : kFp32CopyFp16;
}

template <class Row>
inline int grad_kind(const Row& row) { return static_cast<int>((row.kinds >> 16) & 0xff); }

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

// In the order of _scalars in adam.py.
inline AdamScalars adam_scalars(double grad_factor, double beta1, double one_minus_beta1, double beta2,
                                double one_minus_beta2, double decay_factor, double l2, double denom_factor, double eps,
                                double step_size, bool decoupled, bool update) {
  const auto f = [](double x) { return static_cast<float>(x); };
  return {f(grad_factor),  f(beta1), f(one_minus_beta1), f(beta2),  f(one_minus_beta2), f(decay_factor), f(l2),
          f(denom_factor), f(eps),   f(step_size),       decoupled, update};
}

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
