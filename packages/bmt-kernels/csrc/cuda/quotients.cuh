// Adam's quotients of several elements at once, with the bits of adam_quotient in common/adam.h.
//
// nvcc gives each division and each square root a branch for what its fast sequence of instructions cannot round right:
// zeros, infinities and magnitudes near the ends of fp32. The branches keep the elements from being computed side by
// side. Here one branch serves all elements of a thread, and the fast sequences are those that nvcc makes.
//
// Maths: an approximation of the quotient or root is corrected by its remainder, which a fused multiply-add computes
// exactly. Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", IBM Journal of
// Research and Development 34 (1990).
#pragma once

#include "common/adam.h"
#include "common/half.h"

namespace bmt {
namespace {

// Of numbers that are neither zero nor near the ends of fp32, to about one unit in the last place.
__device__ __forceinline__ float rough_inverse(float x) {
#if defined(__NVCC__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

__device__ __forceinline__ float rough_inverse_root(float x) {
#if defined(__NVCC__)
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / sqrtf(x);
#endif
}

// Correctly rounded, for what all_are_usual accepts.
__device__ __forceinline__ float usual_root(float x) {
  const float inverse = rough_inverse_root(x);
  const float root = x * inverse;
  return fmaf(fmaf(-root, root, x), inverse * 0.5f, root);
}

__device__ __forceinline__ float usual_quotient(float a, float b) {
  const float rough = rough_inverse(b);
  const float inverse = fmaf(rough, fmaf(-b, rough, 1.0f), rough);
  const float quotient = a * inverse;
  return fmaf(inverse, fmaf(-b, quotient, a), quotient);
}

// Whether no quotient, root, remainder or step on the way to them leaves the range in which fp32 has all its bits.
template <int N, class Factors>
__device__ __forceinline__ bool all_are_usual(const float (&exp_avg)[N], const float (&exp_avg_sq)[N],
                                              const Factors& f) {
  // Patterns of positive numbers are ordered as the numbers are; twice the pattern has no sign. What is below the least
  // wraps around and is greater than all others.
  constexpr uint32_t kLeastSquare = (127 - 100) << 23;
  constexpr uint32_t kGreatestSquare = (127 + 60) << 23;
  constexpr uint32_t kLeast = (127 - 60) << 24;
  constexpr uint32_t kGreatest = static_cast<uint32_t>(127 + 60) << 24;
  uint32_t square = 0;
  uint32_t magnitude = 0;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const uint32_t of_square = float_bits(exp_avg_sq[j]) - kLeastSquare;
    const uint32_t of_magnitude = 2 * float_bits(exp_avg[j]) - kLeast;
    square = square > of_square ? square : of_square;
    magnitude = magnitude > of_magnitude ? magnitude : of_magnitude;
  }
  return square <= kGreatestSquare - kLeastSquare && magnitude <= kGreatest - kLeast && f.denom_factor >= 1.0f &&
         f.denom_factor <= 0x1p20f && f.eps >= 0.0f && f.eps <= 0x1p60f;
}

template <int N>
__device__ __forceinline__ void rotate(float (&x)[N], float last) {
#pragma unroll
  for (int j = 0; j + 1 < N; ++j) x[j] = x[j + 1];
  x[N - 1] = last;
}

template <int N, class Factors>
__device__ __forceinline__ void adam_quotients(const float (&exp_avg)[N], const float (&exp_avg_sq)[N],
                                               const Factors& f, float (&quotients)[N]) {
  if (all_are_usual(exp_avg, exp_avg_sq, f)) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      quotients[j] = usual_quotient(exp_avg[j], adam_denominator(usual_root(exp_avg_sq[j]), f));
    }
  } else {
    // A loop, since the code is long; over rotating arrays, since registers have no indices.
    float m[N];
    float v[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      m[j] = exp_avg[j];
      v[j] = exp_avg_sq[j];
    }
#pragma unroll 1
    for (int j = 0; j < N; ++j) {
      rotate(quotients, adam_quotient(m[0], v[0], f));
      rotate(m, 0.0f);
      rotate(v, 0.0f);
    }
  }
}

// adam_element of N elements.
template <int N>
__device__ __forceinline__ void adam_elements(float (&weight)[N], float (&exp_avg)[N], float (&exp_avg_sq)[N],
                                              const float (&grad)[N], const AdamFactors<float>& f, bool decoupled,
                                              bool update, float (&quotients)[N]) {
  // One branch for all elements instead of predicates for each.
  if (decoupled) {
#pragma unroll
    for (int j = 0; j < N; ++j) adam_moments(weight[j], exp_avg[j], exp_avg_sq[j], grad[j], f, true);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) adam_moments(weight[j], exp_avg[j], exp_avg_sq[j], grad[j], f, false);
  }
  adam_quotients(exp_avg, exp_avg_sq, f, quotients);
  if (update) {
#pragma unroll
    for (int j = 0; j < N; ++j) adam_weight(weight[j], quotients[j], f, decoupled);
  }
}

}  // namespace
}  // namespace bmt
