// The two passes of a LAMB step on part of a row.

namespace lamb {

using bmt::LambFactors;
using bmt::LambRow;
using bmt::LambScalars;
using bmt::LambSums;
using bmt::address;

BMT_INLINE LambFactors<float> one_factors(const LambScalars& scalars) {
  return bmt::spread_factors<float>(scalars, [](float x) { return x; });
}

#if BMT_VECTOR
BMT_INLINE LambFactors<Vec> vector_factors(const LambScalars& scalars) {
  return bmt::spread_factors<Vec>(scalars, [](float x) __attribute__((always_inline)) { return spread(x); });
}

// As in the Adam step: the processor's own prefetching follows each array only to the end of a page.
template <class T>
BMT_INLINE void fetch_ahead(const T* p) {
  constexpr int64_t kAhead = 64;
  __builtin_prefetch(p + kAhead);
}
#endif

template <class Weight, class Grad>
static LambSums moments(const LambRow& row, int64_t begin, int64_t end, const LambScalars& scalars) {
  const auto* __restrict weight = address<const typename Weight::Storage>(row.weight);
  const auto* __restrict grad = address<const typename Grad::Storage>(row.grad);
  auto* __restrict exp_avg = address<float>(row.exp_avg);
  auto* __restrict exp_avg_sq = address<float>(row.exp_avg_sq);
  int64_t i = begin;
#if BMT_VECTOR
  const auto spread_out = vector_factors(scalars);
  Lanes weight_lanes = no_lanes();
  Lanes direction_lanes = no_lanes();
  for (; i + kLanes <= end; i += kLanes) {
    for (int j = 0; j < kVectors; ++j) {
      const int64_t at = i + j * kWidth;
      fetch_ahead(weight + at);
      fetch_ahead(grad + at);
      fetch_ahead(exp_avg + at);
      fetch_ahead(exp_avg_sq + at);
      Vec m = load_f32(exp_avg + at);
      Vec v = load_f32(exp_avg_sq + at);
      bmt::move_moments(m, v, load(Grad(), grad + at), spread_out);
      store_f32(exp_avg + at, m);
      store_f32(exp_avg_sq + at, v);
      const Vec w = load(Weight(), weight + at);
      const Vec r = bmt::lamb_direction(w, m, v, spread_out);
      weight_lanes.at[j] = add_square(weight_lanes.at[j], widen(w));
      direction_lanes.at[j] = add_square(direction_lanes.at[j], widen(r));
    }
  }
  LaneSums weights = lane_sums(weight_lanes);
  LaneSums directions = lane_sums(direction_lanes);
#else
  LaneSums weights = no_sums();
  LaneSums directions = no_sums();
#endif
  const auto factors = one_factors(scalars);
  for (; i < end; ++i) {
    bmt::move_moments(exp_avg[i], exp_avg_sq[i], load_one(Grad(), grad + i), factors);
    const float w = load_one(Weight(), weight + i);
    const double p = w;
    const double r = bmt::lamb_direction(w, exp_avg[i], exp_avg_sq[i], factors);
    weights.at[(i - begin) % kLanes] += p * p;
    directions.at[(i - begin) % kLanes] += r * r;
  }
  return {total(weights), total(directions)};
}

template <class Weight, class Copy>
static void update(const LambRow& row, int64_t begin, int64_t end, const LambScalars& scalars, float rate,
                   bool stream_copy) {
  auto* __restrict weight = address<typename Weight::Storage>(row.weight);
  auto* __restrict copy = address<typename Copy::Storage>(row.copy);
  const auto* __restrict exp_avg = address<const float>(row.exp_avg);
  const auto* __restrict exp_avg_sq = address<const float>(row.exp_avg_sq);
  const auto factors = one_factors(scalars);
  const auto one = [&](int64_t i) {
    float w = load_one(Weight(), weight + i);
    w = w - bmt::lamb_direction(w, exp_avg[i], exp_avg_sq[i], factors) * rate;
    store_one(Weight(), weight + i, w);
    store_one(Copy(), copy + i, w);
  };
  int64_t i = begin;
#if BMT_VECTOR
  if (stream_copy) {  // past the caches only whole, aligned vectors are stored
    constexpr uintptr_t kAlignment = kWidth * sizeof(typename Copy::Storage);
    for (; i < end && reinterpret_cast<uintptr_t>(copy + i) % kAlignment != 0; ++i) one(i);
  }
  const auto spread_out = vector_factors(scalars);
  const Vec rates = spread(rate);
  for (; i + kWidth <= end; i += kWidth) {
    fetch_ahead(weight + i);
    fetch_ahead(exp_avg + i);
    fetch_ahead(exp_avg_sq + i);
    Vec w = load(Weight(), weight + i);
    w = w - bmt::lamb_direction(w, load_f32(exp_avg + i), load_f32(exp_avg_sq + i), spread_out) * rates;
    store(Weight(), weight + i, w);
    if (stream_copy) {
      stream(Copy(), copy + i, w);
    } else {
      store(Copy(), copy + i, w);
    }
  }
  if (stream_copy) finish_streams();
#endif
  for (; i < end; ++i) one(i);
}

}  // namespace lamb

#define BMT_LAMB_MOMENTS(weight) {lamb::moments<weight, F32>, lamb::moments<weight, BF16>, lamb::moments<weight, F16>}
#define BMT_LAMB_KERNELS                                                                               \
  {                                                                                                    \
    {BMT_LAMB_MOMENTS(F32), BMT_LAMB_MOMENTS(BF16), BMT_LAMB_MOMENTS(F16)}, {                          \
      lamb::update<F32, NoCopy>, lamb::update<BF16, NoCopy>, lamb::update<F16, NoCopy>,                \
          lamb::update<F32, BF16>, lamb::update<F32, F16>                                              \
    }                                                                                                  \
  }
