// Numbers that travel between ranks in 8 bits: integers, or floats (e4m3), with a scale for each block.
#pragma once

#include "common/half.h"
#include "common/inline.h"

namespace bmt {

struct PackRow {
  int64_t values;
  int64_t numbers;  // 8 bits each
  int64_t scales;   // fp32, one for each block
  int64_t block;    // how many numbers share a scale
  int64_t numel;
};

struct PackScale {
  float scale;    // as stored; NaN if a number of the block is infinite or NaN
  float inverse;  // 0: all numbers of the block become 0
};

// largest: the largest pattern among the numbers of a block, without their signs. NaN is above infinity, and both are
// above all numbers.
template <bool kFloat8>
BMT_INLINE PackScale pack_scale(int32_t largest) {
  const bool finite = largest < 0x7f800000;
  float scale = bits_float(static_cast<uint32_t>(largest)) / (kFloat8 ? 448.0f : 127.0f);
  if (scale < 0x1p-126f) scale = 0.0f;
  return {finite ? scale : bits_float(0x7fc00000u), finite && scale > 0.0f ? 1.0f / scale : 0.0f};
}

// The integer nearest to x (ties to even), |x| <= 2^22: it lands in the last bits of the sum.
BMT_INLINE uint8_t nearest_integer(float x) { return static_cast<uint8_t>(float_bits(x + 0x1.8p23f)); }

// e4m3, |x| <= 448 but for rounding.
BMT_INLINE uint8_t nearest_float8(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // From 2^-6 up: round at bit 20, then move the exponent from bias 127 to bias 7.
  const uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  // Below: 2^14 has an ulp of 2^-9, the unit of the subnormals, so the addition itself rounds.
  const uint32_t subnormal = float_bits(bits_float(magnitude) + 0x1p14f) - 0x46800000u;
  return static_cast<uint8_t>((bits >> 24 & 0x80u) | (magnitude < 0x3c800000u ? subnormal : normal));
}

template <bool kFloat8>
BMT_INLINE uint8_t pack_number(float x, float inverse) {
  return kFloat8 ? nearest_float8(x * inverse) : nearest_integer(x * inverse);
}

// A byte as an integer or as e4m3, times the scale.
template <bool kFloat8>
BMT_INLINE float unpack_number(int8_t byte, float scale) {
  if (!kFloat8) return static_cast<float>(byte) * scale;
  // As the bits of fp32 the exponent is too small by 120.
  return bits_float((static_cast<uint32_t>(static_cast<int32_t>(byte)) << 20) & 0x87f00000u) * 0x1p120f * scale;
}

}  // namespace bmt
