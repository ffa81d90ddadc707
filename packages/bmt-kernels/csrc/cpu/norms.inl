// Sums of powers over a block.

using bmt::kMaximum;
using bmt::kMagnitudes;
using bmt::kPowers;
using bmt::kSquares;

template <int kKind, class Type>
static double norm_block(const void* data, int64_t n, double p) {
  const auto* values = static_cast<const typename Type::Storage*>(data);
  int64_t i = 0;
  LaneSums sums = no_sums();
#if BMT_VECTOR
  if (kKind == kMagnitudes || kKind == kSquares) {
    Lanes lanes = no_lanes();
    for (; i + kLanes <= n; i += kLanes) {
      for (int j = 0; j < kVectors; ++j) {
        const Vec x = load(Type(), values + i + j * kWidth);
        const Wide wide = widen(kKind == kSquares ? x : magnitude(x));
        lanes.at[j] = lanes.at[j] + (kKind == kSquares ? wide * wide : wide);
      }
    }
    sums = lane_sums(lanes);
  }
#else
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      sums.at[lane] += bmt::norm_term<kKind>(load_one(Type(), values + i + lane), p);
    }
  }
#endif
  for (; i < n; ++i) {
    BMT_SCALAR_LOOP;
    sums.at[i % kLanes] += bmt::norm_term<kKind>(load_one(Type(), values + i), p);
  }
  return total(sums);
}

// Magnitudes are ordered as their bits are as integers, and NaN come last.
template <class Type, class Unsigned, class Signed>
static double largest_magnitude(const void* data, int64_t n, double) {
  constexpr Unsigned kMagnitude = static_cast<Unsigned>(~(Unsigned{1} << (sizeof(Unsigned) * 8 - 1)));
  const auto* p = static_cast<const Unsigned*>(data);
  Signed largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Signed magnitude = static_cast<Signed>(p[i] & kMagnitude);
    largest = magnitude > largest ? magnitude : largest;
  }
  typename Type::Storage value;
  std::memcpy(&value, &largest, sizeof value);
  return load_one(Type(), &value);
}

#define BMT_NORM_ROW(kind) {norm_block<kind, F32>, norm_block<kind, BF16>, norm_block<kind, F16>}
#define BMT_NORM_KERNELS                                                                                   \
  {                                                                                                        \
    {                                                                                                      \
      BMT_NORM_ROW(kMagnitudes), BMT_NORM_ROW(kSquares), BMT_NORM_ROW(kPowers),                            \
      {                                                                                                    \
        largest_magnitude<F32, uint32_t, int32_t>, largest_magnitude<BF16, uint16_t, int16_t>,             \
            largest_magnitude<F16, uint16_t, int16_t>                                                      \
      }                                                                                                    \
    }                                                                                                      \
  }
