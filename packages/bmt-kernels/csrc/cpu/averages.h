// Moving averages of sums, and the factors that come out of them.
#pragma once

#include <cmath>
#include <cstdint>

namespace bmt {

inline double sum_of(const float* values, int64_t count) {
  double sum = 0.0;
  for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(values[i]);
  return sum;
}

// average <- average * decay + sum * (1 - decay) / count
inline void move_average(float* average, const float* sum, int64_t length, double decay, double count) {
  const auto kept = static_cast<float>(decay);
  const auto weight = static_cast<float>((1.0 - decay) / count);
  for (int64_t i = 0; i < length; ++i) average[i] = average[i] * kept + sum[i] * weight;
}

// factor <- 1 / sqrt(average / unit)
inline void find_factors(float* factor, const float* average, int64_t length, float unit) {
  for (int64_t i = 0; i < length; ++i) factor[i] = 1.0f / std::sqrt(average[i] / unit);
}

}  // namespace bmt
