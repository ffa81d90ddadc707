// Block-wise 8-bit numbers: the dynamic map, and the nearest of its entries to a number, written once.
//
// Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861: blocks of 256 elements are
// divided by their largest magnitude ("absmax"), and each quotient becomes the number of the nearest entry.
//
// Int is int32_t or a SIMD vector of them with the operators + - & ^ and the functions below.
#pragma once

#include <cstdint>

#include "common/half.h"
#include "common/inline.h"

namespace bmt {

constexpr int kQuantBlock = 256;

// ---- the map -----------------------------------------------------------------------------------
// Decade d of 7 covers (10^(d-7), 10^(d-6)) with the middles of n equal steps, n = 2^(d+1), or 2^d where negative
// numbers take the other half of the codes; then there are 0 and 1. quantize.py has the same formula.

struct DynamicMap {
  float at[256];
};

static constexpr DynamicMap dynamic_map(bool is_signed) {
  DynamicMap map{};
  const int zero = is_signed ? 127 : 0;
  int code = zero + 1;
  double power = 1e6;
  for (int decade = 0; decade < 7; ++decade) {
    const int n = 1 << (is_signed ? decade : decade + 1);
    for (int step = 0; step < n; ++step, ++code) {
      const float value = static_cast<float>((2 * n + 18 * step + 9) / (20.0 * n * power));
      map.at[code] = value;
      if (is_signed) map.at[2 * zero - code] = -value;
    }
    power /= 10;
  }
  map.at[255] = 1.0f;
  return map;
}

constexpr int kSignedZero = 127;  // the code of 0
constexpr int kUnsignedZero = 0;

// ---- the nearest entry -------------------------------------------------------------------------
// The top bits of a number's fp32 pattern (exponent and 6 or 7 bits of the mantissa) name a bucket so narrow that it
// holds at most one boundary between two entries. A bucket's word, less the bucket's first pattern, is rank << shift |
// 2^shift - 1 - the low bits of the boundary: adding a pattern to it carries into the rank exactly if its low bits are
// greater than those of the boundary. The rank counts entries from 0 upwards. Boundaries lie halfway between entries; a
// tie goes to the smaller.

constexpr int kSignedShift = 17;
constexpr int kUnsignedShift = 16;
// The patterns of 2^-22 and 2^-23; whatever is smaller has rank 0.
constexpr int32_t kSignedLeast = 105 << 23;
constexpr int32_t kUnsignedLeast = 104 << 23;
constexpr int32_t kPatternOfOne = 127 << 23;

template <int kCount>
struct Buckets {
  uint32_t at[kCount];
  bool correct;  // no bucket holds two boundaries, and the first begins below all of them
};

// The pattern of the largest fp32 number that is not greater than x, for 2^-126 <= x <= 1.
static constexpr int32_t pattern_below(double x) {
  int exponent = 127;
  while (x < 1.0) {
    x *= 2.0;
    --exponent;
  }
  return (exponent << 23) + static_cast<int32_t>((x - 1.0) * (1 << 23));
}

// Halfway between the entries of a rank and the next: numbers with greater patterns belong to the next.
static constexpr int32_t boundary(const DynamicMap& map, int zero, int rank) {
  return pattern_below((static_cast<double>(map.at[zero + rank]) + map.at[zero + rank + 1]) / 2);
}

// boundary_of(rank) for the ranks 0 .. count - 1, ascending.
template <int kCount, class BoundaryOf>
static constexpr Buckets<kCount> make_buckets(BoundaryOf boundary_of, int count, int32_t least, int shift) {
  Buckets<kCount> buckets{};
  buckets.correct = true;
  int rank = 0;
  for (int i = 0; i < kCount; ++i) {
    const int32_t begin = least + (i << shift);
    const int32_t last = begin + ((1 << shift) - 1);
    buckets.at[i] = static_cast<uint32_t>(rank) << shift;
    for (int held = 0; rank < count && boundary_of(rank) <= last; ++held, ++rank) {
      if (held != 0 || boundary_of(rank) < begin) buckets.correct = false;
      buckets.at[i] += static_cast<uint32_t>(last - boundary_of(rank));
    }
    buckets.at[i] -= static_cast<uint32_t>(begin);
  }
  return buckets;
}

constexpr int kSignedBuckets = ((kPatternOfOne - kSignedLeast) >> kSignedShift) + 1;
constexpr int kUnsignedBuckets = ((kPatternOfOne - kUnsignedLeast) >> kUnsignedShift) + 1;

static constexpr Buckets<kSignedBuckets> signed_buckets() {
  const DynamicMap map = dynamic_map(true);
  const auto boundary_of = [&](int rank) { return boundary(map, kSignedZero, rank); };
  return make_buckets<kSignedBuckets>(boundary_of, 255 - kSignedZero, kSignedLeast, kSignedShift);
}
static constexpr Buckets<kUnsignedBuckets> unsigned_buckets() {
  const DynamicMap map = dynamic_map(false);
  const auto boundary_of = [&](int rank) { return boundary(map, kUnsignedZero, rank); };
  return make_buckets<kUnsignedBuckets>(boundary_of, 255 - kUnsignedZero, kUnsignedLeast, kUnsignedShift);
}
static_assert(signed_buckets().correct && unsigned_buckets().correct, "take one more bit of the mantissa");

BMT_INLINE int32_t constant(int32_t value, int32_t) { return value; }
BMT_INLINE int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }
BMT_INLINE int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
template <int kBits>
BMT_INLINE int32_t shift_down(int32_t a) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) >> kBits);
}
BMT_INLINE int32_t sign_mask(int32_t a) { return a < 0 ? -1 : 0; }
BMT_INLINE int32_t gather(const uint32_t* table, int32_t i) { return static_cast<int32_t>(table[i]); }

// The code of the entry nearest to a number of magnitude 1 or less (or a rounding error more), given its pattern.
template <class Int>
BMT_INLINE Int nearest_unsigned(Int pattern, const uint32_t* buckets) {
  constexpr int32_t kFirst = kUnsignedLeast >> kUnsignedShift;
  const Int x = larger(pattern, constant(kUnsignedLeast, pattern));  // 0 for what is negative
  const Int word = gather(buckets, shift_down<kUnsignedShift>(x) - constant(kFirst, x));
  return shift_down<kUnsignedShift>(word + x);
}

template <class Int>
BMT_INLINE Int nearest_signed(Int pattern, const uint32_t* buckets) {
  constexpr int32_t kFirst = kSignedLeast >> kSignedShift;
  const Int sign = sign_mask(pattern);
  const Int x = larger(pattern & constant(0x7fffffff, pattern), constant(kSignedLeast, pattern));
  const Int word = gather(buckets, shift_down<kSignedShift>(x) - constant(kFirst, x));
  const Int rank = shift_down<kSignedShift>(word + x);
  // Rank 128 is the entry 1, which has no negative.
  const Int within = smaller(rank, constant(255 - kSignedZero, rank) + sign);
  return ((within ^ sign) - sign) + constant(kSignedZero, rank);
}

// ---- a block -----------------------------------------------------------------------------------

// How the elements of a block are divided by its largest magnitude: as (x * power) * inverse, where the power of two
// keeps the inverse away from infinity and from the subnormals.
struct BlockScale {
  float absmax;  // as stored; NaN if an element is infinite or NaN
  float power;
  float inverse;
  bool regular;  // false: every code is that of 0
};

// magnitude: the largest pattern among the elements, without their signs. Infinity and NaN have the largest.
BMT_INLINE BlockScale block_scale(int32_t magnitude) {
  const bool finite = magnitude < 0x7f800000;
  const float absmax = bits_float(finite ? static_cast<uint32_t>(magnitude) : 0x7fc00000u);
  const float power = absmax < 0x1p-64f ? 0x1p64f : absmax > 0x1p64f ? 0x1p-64f : 1.0f;
  const bool regular = finite && magnitude != 0;
  return {absmax, power, regular ? 1.0f / (absmax * power) : 0.0f, regular};
}

template <class V>
BMT_INLINE V normalized(V x, V power, V inverse) {
  return (x * power) * inverse;
}

}  // namespace bmt
