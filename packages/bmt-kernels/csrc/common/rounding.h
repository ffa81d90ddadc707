// Stochastic rounding from fp32 to half precision: the arithmetic, written once.
//
// A number between two neighbours is rounded up with probability (number - lower) / (upper - lower). The random bits
// are a hash of a seed and of the element's index in the logical tensor, so they do not depend on the sharding.
#pragma once

#if !defined(__CUDACC__)
#include <cmath>
#endif

#include "common/half.h"
#include "common/table.h"

namespace bmt {

struct RoundingRow {
  int64_t values;  // float
  int64_t out;     // of the dtype that is rounded to
  int64_t numel;
  int64_t first;   // element i has the index first + i / width * stride + i % width
  int64_t width;
  int64_t stride;
  int64_t seed;    // rounding_noise of the caller's
};
static_assert(sizeof(RoundingRow) == 7 * sizeof(int64_t), "Python packs it");

// 32 well-mixed bits. Two rounds of multiplying and shifting, with the constants that C. Wellons found to have the
// least bias (https://nullprogram.com/blog/2018/07/31/).
BMT_INLINE uint32_t rounding_noise(uint64_t number) {
  uint32_t x = static_cast<uint32_t>(number ^ (number >> 32));
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

template <bool kToHalf>
BMT_INLINE uint16_t rounded_stochastically(float x, uint32_t noise) {
  constexpr uint32_t kLow = (1u << (kToHalf ? 13 : 16)) - 1;  // the bits that are dropped
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) return kToHalf ? float_to_half(x) : float_to_bf16(x);
  const uint32_t rounded = (bits + (noise & kLow)) & ~kLow;
  if (!kToHalf) return static_cast<uint16_t>(rounded >> 16);
  if ((bits & 0x7fffffffu) >= 0x38800000u) return float_to_half(bits_float(rounded));
  // Below its smallest normal number, 2^-14, fp16 has steps of 2^-24.
  const float steps = x * 0x1p24f + static_cast<float>(static_cast<int32_t>(noise & kLow)) * 0x1p-13f;
  return float_to_half(floorf(steps) * 0x1p-24f);
}

// Element i of a row whose elements are neighbours in the logical tensor, too, or are not.
template <bool kToHalf>
BMT_INLINE void round_element(const RoundingRow& row, bool adjacent, int64_t i) {
  const int64_t place = adjacent ? i : i / row.width * row.stride + i % row.width;
  const uint32_t noise = rounding_noise(static_cast<uint64_t>(row.first + place) ^ static_cast<uint64_t>(row.seed));
  address<uint16_t>(row.out)[i] = rounded_stochastically<kToHalf>(address<const float>(row.values)[i], noise);
}

}  // namespace bmt
