// One Adam step on part of a row.

using bmt::AdamFactors;
using bmt::AdamRow;
using bmt::AdamScalars;
using bmt::DirectionSums;
using bmt::address;

// The step on one element or on one vector of them, at the given addresses. Returns the direction of the step.
template <class Weight, class Copy, class Grad>
BMT_INLINE float adam_one(typename Weight::Storage* weight, typename Copy::Storage* copy,
                          const typename Grad::Storage* grad, float* exp_avg, float* exp_avg_sq,
                          const AdamFactors<float>& factors, bool decoupled, bool update) {
  float w = load_one(Weight(), weight);
  float m = *exp_avg;
  float v = *exp_avg_sq;
  const float direction = bmt::adam_element(w, m, v, load_one(Grad(), grad), factors, decoupled, update);
  *exp_avg = m;
  *exp_avg_sq = v;
  if (update) {
    store_one(Weight(), weight, w);
    store_one(Copy(), copy, w);
  }
  return direction;
}

#if BMT_VECTOR
template <class Weight, class Copy, class Grad>
BMT_INLINE Vec adam_vector(typename Weight::Storage* weight, typename Copy::Storage* copy,
                           const typename Grad::Storage* grad, float* exp_avg, float* exp_avg_sq,
                           const AdamFactors<Vec>& factors, bool decoupled, bool update, bool stream_copy) {
  // The processor's own prefetching follows each array only to the end of a page: where the arrays are in a cache,
  // a few vectors of warning take up to a third off the time. Reading beyond the end is harmless here.
  constexpr int64_t kAhead = 64;
  __builtin_prefetch(weight + kAhead);
  __builtin_prefetch(exp_avg + kAhead);
  __builtin_prefetch(exp_avg_sq + kAhead);
  __builtin_prefetch(grad + kAhead);
  Vec w = load(Weight(), weight);
  Vec m = load_f32(exp_avg);
  Vec v = load_f32(exp_avg_sq);
  const Vec direction = bmt::adam_element(w, m, v, load(Grad(), grad), factors, decoupled, update);
  store_f32(exp_avg, m);
  store_f32(exp_avg_sq, v);
  if (update) {
    store(Weight(), weight, w);
    if (stream_copy) {
      stream(Copy(), copy, w);
    } else {
      store(Copy(), copy, w);
    }
  }
  return direction;
}
#endif

BMT_INLINE AdamFactors<float> one_factors(const AdamScalars& scalars) {
  return bmt::spread_factors<float>(scalars, [](float x) { return x; });
}

#if BMT_VECTOR
BMT_INLINE AdamFactors<Vec> vector_factors(const AdamScalars& scalars) {
  return bmt::spread_factors<Vec>(scalars, [](float x) __attribute__((always_inline)) { return spread(x); });
}
#endif

template <class Weight, class Copy, class Grad, bool kDecoupled, bool kUpdate>
BMT_INLINE void adam_loop(const AdamRow& row, int64_t begin, int64_t end, const AdamScalars& scalars, bool stream_copy) {
  auto* __restrict weight = address<typename Weight::Storage>(row.weight);
  auto* __restrict copy = address<typename Copy::Storage>(copy_or_weight(row));
  const auto* __restrict grad = address<const typename Grad::Storage>(row.grad);
  auto* __restrict exp_avg = address<float>(row.exp_avg);
  auto* __restrict exp_avg_sq = address<float>(row.exp_avg_sq);
  const auto factors = one_factors(scalars);
  const auto one = [&](int64_t i) {
    adam_one<Weight, Copy, Grad>(weight + i, copy + i, grad + i, exp_avg + i, exp_avg_sq + i, factors, kDecoupled,
                                 kUpdate);
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
  for (; i + kWidth <= end; i += kWidth) {
    adam_vector<Weight, Copy, Grad>(weight + i, copy + i, grad + i, exp_avg + i, exp_avg_sq + i, spread_out, kDecoupled,
                                    kUpdate, stream_copy);
  }
  if (stream_copy) finish_streams();
#endif
  for (; i < end; ++i) {
    BMT_REMAINDER;
    one(i);
  }
}

template <class Weight, class Copy, class Grad>
static void adam(const AdamRow& row, int64_t begin, int64_t end, const AdamScalars& scalars, bool stream_copy) {
  if (row.copy == 0) stream_copy = false;
  if (scalars.update) {
    if (scalars.decoupled) {
      adam_loop<Weight, Copy, Grad, true, true>(row, begin, end, scalars, stream_copy);
    } else {
      adam_loop<Weight, Copy, Grad, false, true>(row, begin, end, scalars, stream_copy);
    }
  } else if (scalars.decoupled) {
    adam_loop<Weight, Copy, Grad, true, false>(row, begin, end, scalars, false);
  } else {
    adam_loop<Weight, Copy, Grad, false, false>(row, begin, end, scalars, false);
  }
}

// The same, and the sums of the directions and of their squares over the block.
template <class Weight, class Copy, class Grad>
static DirectionSums adam_and_sums(const AdamRow& row, int64_t begin, int64_t end, const AdamScalars& scalars) {
  auto* __restrict weight = address<typename Weight::Storage>(row.weight);
  auto* __restrict copy = address<typename Copy::Storage>(copy_or_weight(row));
  const auto* __restrict grad = address<const typename Grad::Storage>(row.grad);
  auto* __restrict exp_avg = address<float>(row.exp_avg);
  auto* __restrict exp_avg_sq = address<float>(row.exp_avg_sq);
  int64_t i = begin;
#if BMT_VECTOR
  const auto spread_out = vector_factors(scalars);
  Lanes sum_lanes = no_lanes();
  Lanes square_lanes = no_lanes();
  for (; i + kLanes <= end; i += kLanes) {
    for (int j = 0; j < kVectors; ++j) {
      const int64_t at = i + j * kWidth;
      const Wide d = widen(adam_vector<Weight, Copy, Grad>(weight + at, copy + at, grad + at, exp_avg + at,
                                                           exp_avg_sq + at, spread_out, scalars.decoupled,
                                                           scalars.update, false));
      sum_lanes.at[j] = sum_lanes.at[j] + d;
      square_lanes.at[j] = add_square(square_lanes.at[j], d);
    }
  }
  LaneSums sums = lane_sums(sum_lanes);
  LaneSums squares = lane_sums(square_lanes);
#else
  LaneSums sums = no_sums();
  LaneSums squares = no_sums();
#endif
  const auto factors = one_factors(scalars);
  for (; i < end; ++i) {
    BMT_REMAINDER;
    const double d = adam_one<Weight, Copy, Grad>(weight + i, copy + i, grad + i, exp_avg + i, exp_avg_sq + i, factors,
                                                  scalars.decoupled, scalars.update);
    sums.at[(i - begin) % kLanes] += d;
    squares.at[(i - begin) % kLanes] += d * d;
  }
  return {total(sums), total(squares)};
}

#define BMT_ADAM_ROW(f, weight, copy) {f<weight, copy, F32>, f<weight, copy, BF16>, f<weight, copy, F16>}
#define BMT_ADAM_TABLE(f)                                                                             \
  {                                                                                                   \
    BMT_ADAM_ROW(f, F32, NoCopy), BMT_ADAM_ROW(f, BF16, NoCopy), BMT_ADAM_ROW(f, F16, NoCopy),        \
        BMT_ADAM_ROW(f, F32, BF16), BMT_ADAM_ROW(f, F32, F16)                                         \
  }
#define BMT_ADAM_KERNELS {BMT_ADAM_TABLE(adam), BMT_ADAM_TABLE(adam_and_sums)}
