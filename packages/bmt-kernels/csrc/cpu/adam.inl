// One Adam step on part of a row.

using bmt::AdamFactors;
using bmt::AdamRow;
using bmt::AdamScalars;
using bmt::address;

template <class Weight, class Copy, class Grad, bool kDecoupled, bool kUpdate>
BMT_INLINE void adam_loop(const AdamRow& row, int64_t begin, int64_t end, const AdamScalars& scalars) {
  auto* __restrict weight = address<typename Weight::Storage>(row.weight);
  auto* __restrict copy = address<typename Copy::Storage>(row.copy);
  const auto* __restrict grad = address<const typename Grad::Storage>(row.grad);
  auto* __restrict exp_avg = address<float>(row.exp_avg);
  auto* __restrict exp_avg_sq = address<float>(row.exp_avg_sq);
  int64_t i = begin;
#if BMT_VECTOR
  const auto vector_factors = bmt::spread_factors<Vec>(scalars, [](float x) __attribute__((always_inline)) { return spread(x); });
  for (; i + kWidth <= end; i += kWidth) {
    Vec w = load(Weight(), weight + i);
    Vec m = load_f32(exp_avg + i);
    Vec v = load_f32(exp_avg_sq + i);
    bmt::adam_element(w, m, v, load(Grad(), grad + i), vector_factors, kDecoupled, kUpdate);
    store_f32(exp_avg + i, m);
    store_f32(exp_avg_sq + i, v);
    if (kUpdate) {
      store(Weight(), weight + i, w);
      store(Copy(), copy + i, w);
    }
  }
#endif
  const auto factors = bmt::spread_factors<float>(scalars, [](float x) { return x; });
  for (; i < end; ++i) {
    float w = load_one(Weight(), weight + i);
    float m = exp_avg[i];
    float v = exp_avg_sq[i];
    bmt::adam_element(w, m, v, load_one(Grad(), grad + i), factors, kDecoupled, kUpdate);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    if (kUpdate) {
      store_one(Weight(), weight + i, w);
      store_one(Copy(), copy + i, w);
    }
  }
}

template <class Weight, class Copy, class Grad>
static void adam(const AdamRow& row, int64_t begin, int64_t end, const AdamScalars& scalars) {
  if (scalars.update) {
    if (scalars.decoupled) {
      adam_loop<Weight, Copy, Grad, true, true>(row, begin, end, scalars);
    } else {
      adam_loop<Weight, Copy, Grad, false, true>(row, begin, end, scalars);
    }
  } else if (scalars.decoupled) {
    adam_loop<Weight, Copy, Grad, true, false>(row, begin, end, scalars);
  } else {
    adam_loop<Weight, Copy, Grad, false, false>(row, begin, end, scalars);
  }
}

#define BMT_ADAM_ROW(weight, copy) {adam<weight, copy, F32>, adam<weight, copy, BF16>, adam<weight, copy, F16>}
#define BMT_ADAM_KERNELS                                                                  \
  {                                                                                       \
    {                                                                                     \
      BMT_ADAM_ROW(F32, NoCopy), BMT_ADAM_ROW(BF16, NoCopy), BMT_ADAM_ROW(F16, NoCopy),   \
          BMT_ADAM_ROW(F32, BF16), BMT_ADAM_ROW(F32, F16)                                 \
    }                                                                                     \
  }
