// bfloat16 and IEEE half precision as 16-bit patterns, converted with integer arithmetic.
//
// Rounding is to nearest, ties to even, with subnormals kept and NaN staying NaN: the bits PyTorch gives.
// No branches, so that a compiler can vectorise loops over these functions.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/inline.h"

namespace bmt {

BMT_INLINE uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

BMT_INLINE float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

BMT_INLINE float bf16_to_float(uint16_t h) { return bits_float(static_cast<uint32_t>(h) << 16); }

BMT_INLINE uint16_t float_to_bf16(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<uint16_t>(nan ? 0x7fc0u : rounded);
}

BMT_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  // Moving the exponent from bias 15 to bias 127 adds 112 to it; infinity and NaN go on to 255.
  const uint32_t normal = (magnitude << 13) + 0x38000000u;
  const uint32_t special = normal + 0x38000000u;
  // A subnormal counts multiples of 2^-24.
  const uint32_t subnormal = float_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t finite = magnitude < 0x0400u ? subnormal : normal;
  const uint32_t quiet = magnitude > 0x7c00u ? 0x00400000u : 0u;
  return bits_float(sign | (magnitude >= 0x7c00u ? (special | quiet) : finite));
}

BMT_INLINE uint16_t float_to_half(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // From 2^-14 up: round at bit 13 (a carry goes into the exponent, as it should), then move the exponent.
  const uint32_t carried = magnitude + 0x0fffu + ((magnitude >> 13) & 1u) - 0x38000000u;
  const uint32_t normal = (carried >> 13) < 0x7c00u ? (carried >> 13) : 0x7c00u;
  // Below: 0.5 has an ulp of 2^-24, the unit of the subnormals, so the addition itself rounds.
  const uint32_t subnormal = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t number = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x03ffu);
  return static_cast<uint16_t>(sign | (magnitude > 0x7f800000u ? nan : number));
}

}  // namespace bmt
