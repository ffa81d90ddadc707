// One Adam step with 8-bit moments on part of a row: block by block, the moments stay in the first-level cache
// between the step and their requantisation. That of a block begins after the step of the next one, which does not
// have to wait for the first block's largest magnitudes.

using bmt::Adam8bitRow;

// New moments of a block and where their codes go.
struct NewMoments {
  alignas(64) float exp_avg[kQuantBlock];
  alignas(64) float exp_avg_sq[kQuantBlock];
  BlockScale scale_avg, scale_avg_sq;
  int n;
  int64_t place;
  uint8_t* codes_avg;
  uint8_t* codes_avg_sq;
};

template <class Weight, class Copy, class Grad, bool kDecoupled, bool kUpdate>
BMT_INLINE void adam8bit_loop(const Adam8bitRow& row, int64_t first, int64_t last, const AdamScalars& scalars) {
  auto* absmax_avg = address<float>(row.absmax_avg);
  auto* absmax_avg_sq = address<float>(row.absmax_avg_sq);
  NewMoments buffers[2];
  NewMoments* now = &buffers[0];
  NewMoments* before = &buffers[1];
  const auto quantize = [&](NewMoments& moments) __attribute__((always_inline)) {
    absmax_avg[moments.place] = moments.scale_avg.absmax;
    absmax_avg_sq[moments.place] = moments.scale_avg_sq.absmax;
    quantize_block<true>(moments.exp_avg, moments.n, moments.scale_avg, moments.codes_avg);
    quantize_block<false>(moments.exp_avg_sq, moments.n, moments.scale_avg_sq, moments.codes_avg_sq);
  };
  const auto factors = bmt::spread_factors<float>(scalars, [](float x) { return x; });
#if BMT_VECTOR
  const auto vector_factors = bmt::spread_factors<Vec>(scalars, [](float x) __attribute__((always_inline)) { return spread(x); });
#endif
  for (int64_t block = first; block < last; block += kQuantBlock) {
    const int64_t begin = block < row.begin ? row.begin : block;
    const int n = static_cast<int>((block + kQuantBlock < last ? block + kQuantBlock : last) - begin);
    using WeightStorage = typename Weight::Storage;
    using GradStorage = typename Grad::Storage;
    auto* __restrict weight = address<WeightStorage>(row.weight + begin * static_cast<int64_t>(sizeof(WeightStorage)));
    auto* __restrict copy = address<uint16_t>(row.copy + begin * static_cast<int64_t>(sizeof(uint16_t)));
    const auto* __restrict grad =
        address<const GradStorage>(row.grad + begin * static_cast<int64_t>(sizeof(GradStorage)));
    auto* __restrict codes_avg = address<uint8_t>(row.exp_avg + begin);
    auto* __restrict codes_avg_sq = address<uint8_t>(row.exp_avg_sq + begin);
    const int64_t place = block / kQuantBlock;
    const float scale_avg = absmax_avg[place];
    const float scale_avg_sq = absmax_avg_sq[place];
    float* __restrict exp_avg = now->exp_avg;
    float* __restrict exp_avg_sq = now->exp_avg_sq;

    int32_t magnitude_avg = 0;
    int32_t magnitude_avg_sq = 0;
    int i = 0;
#if BMT_VECTOR
    Ints magnitudes_avg = constant(0, Ints());
    Ints magnitudes_avg_sq = constant(0, Ints());
    for (; i + kWidth <= n; i += kWidth) {
      Vec w = load(Weight(), weight + i);
      Vec m = map_entries<true>(codes_avg + i) * spread(scale_avg);
      Vec v = map_entries<false>(codes_avg_sq + i) * spread(scale_avg_sq);
      bmt::adam_element(w, m, v, load(Grad(), grad + i), vector_factors, kDecoupled, kUpdate);
      store_f32(exp_avg + i, m);
      store_f32(exp_avg_sq + i, v);
      magnitudes_avg = larger(magnitudes_avg, magnitude_of(m));
      magnitudes_avg_sq = larger(magnitudes_avg_sq, magnitude_of(v));
      if (kUpdate) {
        store(Weight(), weight + i, w);
        store(Copy(), copy + i, w);
      }
    }
    magnitude_avg = largest_lane(magnitudes_avg);
    magnitude_avg_sq = largest_lane(magnitudes_avg_sq);
#endif
    for (; i < n; ++i) {
      BMT_REMAINDER;
      float w = load_one(Weight(), weight + i);
      float m = map_entry<true>(codes_avg[i]) * scale_avg;
      float v = map_entry<false>(codes_avg_sq[i]) * scale_avg_sq;
      bmt::adam_element(w, m, v, load_one(Grad(), grad + i), factors, kDecoupled, kUpdate);
      exp_avg[i] = m;
      exp_avg_sq[i] = v;
      magnitude_avg = bmt::larger(magnitude_avg, magnitude_of(m));
      magnitude_avg_sq = bmt::larger(magnitude_avg_sq, magnitude_of(v));
      if (kUpdate) {
        store_one(Weight(), weight + i, w);
        store_one(Copy(), copy + i, w);
      }
    }
    now->scale_avg = bmt::block_scale(magnitude_avg);
    now->scale_avg_sq = bmt::block_scale(magnitude_avg_sq);
    now->n = n;
    now->place = place;
    now->codes_avg = codes_avg;
    now->codes_avg_sq = codes_avg_sq;
    if (block != first) quantize(*before);
    NewMoments* const next = before;
    before = now;
    now = next;
  }
  if (first < last) quantize(*before);
}

template <class Weight, class Copy, class Grad>
static void adam8bit(const Adam8bitRow& row, int64_t first, int64_t last, const AdamScalars& scalars) {
  if (scalars.update) {
    if (scalars.decoupled) {
      adam8bit_loop<Weight, Copy, Grad, true, true>(row, first, last, scalars);
    } else {
      adam8bit_loop<Weight, Copy, Grad, false, true>(row, first, last, scalars);
    }
  } else if (scalars.decoupled) {
    adam8bit_loop<Weight, Copy, Grad, true, false>(row, first, last, scalars);
  } else {
    adam8bit_loop<Weight, Copy, Grad, false, false>(row, first, last, scalars);
  }
}

#define BMT_ADAM8BIT_ROW(weight, copy) {adam8bit<weight, copy, F32>, adam8bit<weight, copy, BF16>, adam8bit<weight, copy, F16>}
#define BMT_ADAM8BIT_KERNELS                                                                          \
  {                                                                                                   \
    {                                                                                                 \
      BMT_ADAM8BIT_ROW(F32, NoCopy), BMT_ADAM8BIT_ROW(BF16, NoCopy), BMT_ADAM8BIT_ROW(F16, NoCopy),   \
          BMT_ADAM8BIT_ROW(F32, BF16), BMT_ADAM8BIT_ROW(F32, F16)                                     \
    }                                                                                                 \
  }
