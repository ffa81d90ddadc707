// The passes of a LAMB step on part of a row.

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

// The first pass; with kKeep the directions go to where the row has room for them.
template <class Weight, class Grad, bool kKeep>
static LambSums moments(const LambRow& row, int64_t begin, int64_t end, const LambScalars& scalars) {
  const auto* __restrict weight = address<const typename Weight::Storage>(row.weight);
  const auto* __restrict grad = address<const typename Grad::Storage>(row.grad);
  auto* __restrict exp_avg = address<float>(row.exp_avg);
  auto* __restrict exp_avg_sq = address<float>(row.exp_avg_sq);
  auto* __restrict directions = address<float>(row.direction);
  int64_t i = begin;
  const auto factors = one_factors(scalars);
#if BMT_VECTOR
  const auto spread_out = vector_factors(scalars);
  Lanes weight_lanes = no_lanes();
  Lanes direction_lanes = no_lanes();
#else
  LaneSums weights = no_sums();
  LaneSums direction_sums = no_sums();
#endif
  // Squares are added in single precision over `length` elements of a lane, and these sums in double precision.
  const auto run = [&](int length) __attribute__((always_inline)) {
#if BMT_VECTOR
    Vec weight_squares[kVectors], direction_squares[kVectors];
    for (int j = 0; j < kVectors; ++j) weight_squares[j] = direction_squares[j] = spread(0.0f);
    for (int n = 0; n < length; ++n, i += kLanes) {
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
        if (kKeep) store_f32(directions + at, r);
        weight_squares[j] = weight_squares[j] + w * w;
        direction_squares[j] = direction_squares[j] + r * r;
      }
    }
    for (int j = 0; j < kVectors; ++j) {
      weight_lanes.at[j] = weight_lanes.at[j] + widen(weight_squares[j]);
      direction_lanes.at[j] = direction_lanes.at[j] + widen(direction_squares[j]);
    }
#else
    float weight_squares[kLanes] = {}, direction_squares[kLanes] = {};
    for (int n = 0; n < length; ++n, i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const int64_t at = i + lane;
        bmt::move_moments(exp_avg[at], exp_avg_sq[at], load_one(Grad(), grad + at), factors);
        const float w = load_one(Weight(), weight + at);
        const float r = bmt::lamb_direction(w, exp_avg[at], exp_avg_sq[at], factors);
        if (kKeep) directions[at] = r;
        weight_squares[lane] += w * w;
        direction_squares[lane] += r * r;
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      weights.at[lane] += static_cast<double>(weight_squares[lane]);
      direction_sums.at[lane] += static_cast<double>(direction_squares[lane]);
    }
#endif
  };
  constexpr int kRun = 8;
  while (i + kRun * kLanes <= end) run(kRun);
  while (i + kLanes <= end) run(1);
#if BMT_VECTOR
  LaneSums weights = lane_sums(weight_lanes);
  LaneSums direction_sums = lane_sums(direction_lanes);
#endif
  for (; i < end; ++i) {
    bmt::move_moments(exp_avg[i], exp_avg_sq[i], load_one(Grad(), grad + i), factors);
    const float w = load_one(Weight(), weight + i);
    const double p = w;
    const float direction = bmt::lamb_direction(w, exp_avg[i], exp_avg_sq[i], factors);
    if (kKeep) directions[i] = direction;
    const double r = direction;
    weights.at[(i - begin) % kLanes] += p * p;
    direction_sums.at[(i - begin) % kLanes] += r * r;
  }
  return {total(weights), total(direction_sums)};
}

// The second pass; with kKept the directions are what the first has kept.
template <class Weight, class Copy, bool kKept>
static void update(const LambRow& row, int64_t begin, int64_t end, const LambScalars& scalars, float rate,
                   bool stream_copy) {
  auto* __restrict weight = address<typename Weight::Storage>(row.weight);
  auto* __restrict copy = address<typename Copy::Storage>(copy_or_weight(row));
  const auto* __restrict exp_avg = address<const float>(row.exp_avg);
  const auto* __restrict exp_avg_sq = address<const float>(row.exp_avg_sq);
  const auto* __restrict directions = address<const float>(row.direction);
  const auto factors = one_factors(scalars);
  const auto one = [&](int64_t i) {
    float w = load_one(Weight(), weight + i);
    w = w - (kKept ? directions[i] : bmt::lamb_direction(w, exp_avg[i], exp_avg_sq[i], factors)) * rate;
    store_one(Weight(), weight + i, w);
    store_one(Copy(), copy + i, w);
  };
  int64_t i = begin;
#if BMT_VECTOR
  if (stream_copy) {  // past the caches only whole, aligned vectors are stored
    constexpr uintptr_t kAlignment = kWidth * sizeof(typename Copy::Storage);
    for (; i < end && reinterpret_cast<uintptr_t>(copy + i) % kAlignment != 0; ++i) {
      BMT_SCALAR_LOOP;
      one(i);
    }
  }
  const auto spread_out = vector_factors(scalars);
  const Vec rates = spread(rate);
  for (; i + kWidth <= end; i += kWidth) {
    fetch_ahead(weight + i);
    Vec w = load(Weight(), weight + i);
    if constexpr (kKept) {
      w = w - load_f32(directions + i) * rates;
    } else {
      fetch_ahead(exp_avg + i);
      fetch_ahead(exp_avg_sq + i);
      w = w - bmt::lamb_direction(w, load_f32(exp_avg + i), load_f32(exp_avg_sq + i), spread_out) * rates;
    }
    store(Weight(), weight + i, w);
    if (stream_copy) {
      stream(Copy(), copy + i, w);
    } else {
      store(Copy(), copy + i, w);
    }
  }
  if (stream_copy) finish_streams();
#endif
  for (; i < end; ++i) {
    BMT_REMAINDER;
    one(i);
  }
}

}  // namespace lamb

#define BMT_LAMB_MOMENTS(weight, keep) \
  {lamb::moments<weight, F32, keep>, lamb::moments<weight, BF16, keep>, lamb::moments<weight, F16, keep>}
#define BMT_LAMB_ALL_MOMENTS(keep) \
  {BMT_LAMB_MOMENTS(F32, keep), BMT_LAMB_MOMENTS(BF16, keep), BMT_LAMB_MOMENTS(F16, keep)}
#define BMT_LAMB_UPDATES(kept)                                                                         \
  {lamb::update<F32, NoCopy, kept>, lamb::update<BF16, NoCopy, kept>, lamb::update<F16, NoCopy, kept>, \
   lamb::update<F32, BF16, kept>, lamb::update<F32, F16, kept>}
#define BMT_LAMB_KERNELS                                         \
  {                                                              \
    {BMT_LAMB_ALL_MOMENTS(false), BMT_LAMB_ALL_MOMENTS(true)}, { \
      BMT_LAMB_UPDATES(false), BMT_LAMB_UPDATES(true)            \
    }                                                            \
  }
