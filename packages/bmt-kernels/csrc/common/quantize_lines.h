// Entries of the dynamic map, and the nearest of them, by arithmetic instead of tables of hundreds of numbers: for
// vectors that hold tables of 16 or 32 numbers in registers. quantize.h says what is computed; that it is computed
// exactly is proved below, for each entry and each boundary, by the compiler.
#pragma once

#include "common/quantize.h"

namespace bmt {

// Ranks are counted from 0 upwards as in quantize.h; decade d begins at rank n (signed) or n - 1, n being the number
// of its steps. Segments are 0 for rank 0, 1 .. 7 for the decades and 8 for the entry 1.
constexpr int kSegments = 9;

static constexpr int first_rank(bool is_signed, int segment) {
  return segment == 0 ? 0 : (1 << (is_signed ? segment - 1 : segment)) - !is_signed;
}
static constexpr int last_rank(bool is_signed, int segment) {
  return segment + 1 < kSegments ? first_rank(is_signed, segment + 1) - 1 : first_rank(is_signed, segment);
}

// a * b + c, which vectors round once and this function, by way of double, nearly always to the same.
static constexpr float fused(float a, float b, float c) {
  return static_cast<float>(static_cast<double>(a) * b + c);
}

// ---- entries -----------------------------------------------------------------------------------
// A code's place is (code + 1) / 256 without a sign and (code - 127) / 256 with one, so that the exponent of a place
// names its decade; -8 .. 0, and that of the place 0, differ in their last four bits. With p the power of two in a
// place, n / 256, the entry is a fraction of whole numbers, (18 * 256 * place - 16 * 256 * p + 9) / (20 n 10^(6 -
// decade)). The inverse of the denominator is the sum of `high`, so short that its product with the numerator is
// exact, and `low`. The same formula serves for 0 and 1, with "inverses" made for them.

constexpr float kStepOfPlace = 1.0f / 256;
constexpr float kNumeratorOfPlace = 18.0f * 256;
constexpr float kNumeratorOfPower = -16.0f * 256;
constexpr float kNumeratorOfAll = 9.0f;

// Placing a code: the number of this pattern, with the code in its last bits, less the number that it is for place 0.
constexpr int32_t kPlacePattern = (127 + 15) << 23;
static constexpr float place_origin(bool is_signed) {
  return 32768.0f + (is_signed ? kSignedZero : kUnsignedZero - 1) * kStepOfPlace;
}

struct Fractions {
  float high[16];
  float low[16];
  bool correct;
};

static constexpr int exponent_index(float place) {
  if (place == 0.0f) return 0;
  int exponent = 127;
  for (; place < 1.0f; place *= 2.0f) --exponent;
  return exponent & 15;
}

// x without all but the first `bits` bits.
static constexpr double shortened(double x, int bits) {
  double power = 1.0;
  while (x * power < 1.0) power *= 2.0;
  const double unit = power * (1 << (bits - 1));
  return static_cast<double>(static_cast<int64_t>(x * unit)) / unit;
}

static constexpr Fractions make_fractions(bool is_signed) {
  const DynamicMap map = dynamic_map(is_signed);
  const int zero = is_signed ? kSignedZero : kUnsignedZero;
  Fractions fractions{};
  double power = 1e6;
  for (int segment = 1; segment < kSegments; ++segment, power /= 10) {  // 0 / 256 for segment 0
    const int first = first_rank(is_signed, segment) + !is_signed;
    const bool decade = segment + 1 < kSegments;
    const double inverse = 1.0 / (decade ? 20.0 * first * power : 2 * first + 9);
    const int index = exponent_index(first * kStepOfPlace);
    fractions.high[index] = static_cast<float>(shortened(inverse, 11));
    fractions.low[index] = static_cast<float>(inverse - shortened(inverse, 11));
  }

  fractions.correct = true;
  for (int rank = 0; zero + rank < 256; ++rank) {
    const float place = (rank + !is_signed) * kStepOfPlace;
    float power_of_two = place == 0.0f ? 0.0f : kStepOfPlace;
    while (power_of_two <= place / 2 && place != 0.0f) power_of_two *= 2;
    const int index = exponent_index(place);
    const float numerator = place * kNumeratorOfPlace + (power_of_two * kNumeratorOfPower + kNumeratorOfAll);
    const float main = numerator * fractions.high[index];
    if (static_cast<double>(main) != static_cast<double>(numerator) * fractions.high[index]) fractions.correct = false;
    if (main + numerator * fractions.low[index] != map.at[zero + rank]) fractions.correct = false;
  }
  return fractions;
}
static_assert(make_fractions(true).correct && make_fractions(false).correct, "every entry must come out exactly");

// ---- the nearest entry -------------------------------------------------------------------------
// Within a segment, rank = slope * x + intercept, cut off to an integer and to the segment's last rank, but for
// rounding errors. The sum with a power of two has as its last bits the code and kFractionBits bits of fraction;
// where that is within kDoubt of an integer, the buckets of quantize.h decide.
//
// The segment of a number is found as its rank is there, with buckets of one exponent each. A bucket's word also
// exchanges the exponent: the sum with the whole pattern has that of the segment's number of steps, twice.
//
// A line is the rank and half a one where there are signs, the rank and one and a half where there are none. So the
// limit for a segment of n steps is 2 n, and the intercept 8 / 9 n + 1 / 2. Segments 0 and 8 count as having 1/2 and
// 128 steps, or 1 and 256. Their slopes bring the numbers in them well between the boundaries, by the limit or nearly 1.

constexpr int kSegmentShift = 23;
constexpr int32_t kSegmentLeast = 96 << 23;  // and 32 buckets up to the one of 1, the exponent's last five bits
constexpr int kFractionBits = 14;
constexpr float kLinePower = 512.0f;  // 2^(23 - kFractionBits)
constexpr float kUnit = 1.0f / 16384;  // the last bit of what follows
constexpr float kDoubt = 2 * kUnit;
// Of a line whose last bits are counted from kDoubt below: all zero within kDoubt of an integer.
constexpr int32_t kFarFromInteger = (1 << kFractionBits) - 4;
constexpr float kInterceptOfLimit = static_cast<float>(4.0 / 9.0);
constexpr float kIntercept = 0.5f;
constexpr float kSteep = 1 << 30;

// A line without a sign is added to the first of these. One with a sign, less 1, takes the sign of the number and is
// then added to the second, so that negative numbers count down from half a rank above their code.
constexpr float kUnsignedOrigin = kLinePower - 1.5f + kDoubt;
constexpr float kSignedOrigin = kLinePower + kSignedZero + 0.5f + kDoubt;
constexpr float kLeastSigned = kLinePower + 0.5f;  // code 0, also for -1

struct Lines {
  float slope[16];  // at the last four bits of the exchanged exponent
  uint32_t segments[32];
  bool correct;
};

static constexpr float number_of(int32_t pattern) {
  double x = 1.0 + (pattern & 0x7fffff) / 8388608.0;
  for (int exponent = pattern >> 23; exponent < 127; ++exponent) x /= 2.0;
  return static_cast<float>(x);
}

static constexpr Lines make_lines(bool is_signed) {
  const DynamicMap map = dynamic_map(is_signed);
  const int zero = is_signed ? kSignedZero : kUnsignedZero;
  const int first_exponent = is_signed ? 127 : 128;
  Lines lines{};
  double power = 1e6;
  for (int segment = 1; segment + 1 < kSegments; ++segment, power /= 10) {
    const double n = last_rank(is_signed, segment) - first_rank(is_signed, segment) + 1;
    lines.slope[(first_exponent + segment) & 15] = static_cast<float>(power * n / 0.9);
  }
  lines.slope[first_exponent & 15] = kSteep;
  lines.slope[(first_exponent + kSegments - 1) & 15] =
      static_cast<float>(is_signed ? 129 - 0.5 - 256 / 2.25 : 257 - 0.5 - 512 / 2.25);

  const auto begin_of_next = [&](int segment) { return boundary(map, zero, first_rank(is_signed, segment + 1) - 1); };
  const auto segments = make_buckets<32>(begin_of_next, kSegments - 1, kSegmentLeast, kSegmentShift);
  for (uint32_t i = 0; i < 32; ++i) {
    lines.segments[i] = segments.at[i] + (static_cast<uint32_t>(first_exponent) << kSegmentShift);
  }

  const auto line_at = [&](int32_t pattern, int segment) {
    const int exponent = first_exponent + segment;
    const float limit = static_cast<float>(1 << (exponent - 127));
    const float line = fused(number_of(pattern), lines.slope[exponent & 15], fused(limit, kInterceptOfLimit, kIntercept));
    return line < limit ? line : limit;
  };
  // Whether the number gets a code of this or a greater rank, or of a smaller rank, or is in doubt; a unit is left for
  // what `fused` might miss.
  const float margin = kDoubt - kUnit;
  const auto reaches = [&](float line, int rank) {
    if (!is_signed) return (line + kUnsignedOrigin) - kUnsignedOrigin + margin >= rank + 1.5f;
    const float up = ((line - 1.0f) + kSignedOrigin) - (kLinePower + kDoubt);
    const float down = (kSignedOrigin - (line - 1.0f)) - (kLinePower + kDoubt);
    return up + margin >= zero + rank && down - margin < zero - rank + 1;
  };
  const auto stays_below = [&](float line, int rank) {
    if (!is_signed) return (line + kUnsignedOrigin) - kUnsignedOrigin - margin < rank + 1.5f;
    const float up = ((line - 1.0f) + kSignedOrigin) - (kLinePower + kDoubt);
    const float down = (kSignedOrigin - (line - 1.0f)) - (kLinePower + kDoubt);
    return up - margin < zero + rank && down + margin >= zero - rank + 1;
  };
  // The least and the largest number of each rank must come out right. What lies between follows, for the computation
  // never decreases within a segment.
  lines.correct = segments.correct;
  for (int segment = 0; segment < kSegments; ++segment) {
    for (int rank = first_rank(is_signed, segment); rank <= last_rank(is_signed, segment); ++rank) {
      const int32_t least = rank == 0 ? kSegmentLeast : boundary(map, zero, rank - 1) + 1;
      const int32_t largest = zero + rank == 255 ? kPatternOfOne + 8 : boundary(map, zero, rank);
      if (!reaches(line_at(least, segment), rank) || !stays_below(line_at(largest, segment), rank + 1)) {
        lines.correct = false;
      }
    }
  }
  return lines;
}
static_assert(make_lines(true).correct && make_lines(false).correct, "kDoubt must cover the rounding errors");

}  // namespace bmt
