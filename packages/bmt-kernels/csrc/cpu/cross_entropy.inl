// Cross entropy of one row of logits.
//
// Sums are taken in 16 lanes, element i going to lane i % 16, and the lanes are added in a fixed order: one vector of
// AVX-512, two of AVX2 or an array give the same bits. Long rows are taken in blocks that stay in the nearest cache
// between the search for the largest logit and the sum of exponentials; blocks also keep rounding errors small.

namespace cross_entropy {

using bmt::maximum;

constexpr int kLanes = 16;
constexpr int64_t kBlock = 2048;

#if BMT_VECTOR
using Part = Vec;
constexpr int kPartWidth = kWidth;
BMT_INLINE Part part_of(float value) { return spread(value); }
template <class Type>
BMT_INLINE Part load_part(Type type, const typename Type::Storage* p) { return load(type, p); }
template <class Type>
BMT_INLINE void store_part(Type type, typename Type::Storage* p, Part x) { store(type, p, x); }
#else
using Part = float;
constexpr int kPartWidth = 1;
BMT_INLINE Part part_of(float value) { return value; }
template <class Type>
BMT_INLINE Part load_part(Type type, const typename Type::Storage* p) { return load_one(type, p); }
template <class Type>
BMT_INLINE void store_part(Type type, typename Type::Storage* p, Part x) { store_one(type, p, x); }
#endif

constexpr int kParts = kLanes / kPartWidth;

struct Lanes {
  Part part[kParts];
};

BMT_INLINE Lanes lanes_of(float value) {
  Lanes lanes;
  for (int k = 0; k < kParts; ++k) lanes.part[k] = part_of(value);
  return lanes;
}

template <class Type>
BMT_INLINE Lanes load_lanes(Type type, const typename Type::Storage* p) {
  Lanes lanes;
  for (int k = 0; k < kParts; ++k) lanes.part[k] = load_part(type, p + k * kPartWidth);
  return lanes;
}

BMT_INLINE void spill(const Lanes& lanes, float* to) {
  for (int k = 0; k < kParts; ++k) store_part(F32(), to + k * kPartWidth, lanes.part[k]);
}

BMT_INLINE float add_lanes(float* lanes) {
  for (int step = kLanes / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) lanes[i] = lanes[i] + lanes[i + step];
  }
  return lanes[0];
}

template <class Type>
static float largest_of(const typename Type::Storage* x, int64_t n) {
  Lanes largest = lanes_of(-INFINITY);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Lanes values = load_lanes(Type(), x + i);
    for (int k = 0; k < kParts; ++k) largest.part[k] = maximum(values.part[k], largest.part[k]);
  }
  float lanes[kLanes];
  spill(largest, lanes);
  for (; i < n; ++i) {
    BMT_SCALAR_LOOP;
    lanes[i % kLanes] = maximum(load_one(Type(), x + i), lanes[i % kLanes]);
  }
  for (int k = 1; k < kLanes; ++k) lanes[0] = maximum(lanes[k], lanes[0]);
  return lanes[0];
}

// Adds up exp(x_i - shift) and, if asked to, w_i x_i.
template <class Type, int kSums>
static void add_block(const typename Type::Storage* x, const float* weights, int64_t n, float shift, float& sum,
                      float& logit_sum) {
  Lanes sums = lanes_of(0.0f), logits = lanes_of(0.0f);
  const Part shifts = part_of(shift);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Lanes values = load_lanes(Type(), x + i);
    for (int k = 0; k < kParts; ++k) {
      sums.part[k] = sums.part[k] + bmt::exponential(values.part[k] - shifts);
    }
    if (kSums == bmt::kPlainSum) {
      for (int k = 0; k < kParts; ++k) logits.part[k] = logits.part[k] + values.part[k];
    } else if (kSums == bmt::kWeightedSum) {
      const Lanes w = load_lanes(F32(), weights + i);
      for (int k = 0; k < kParts; ++k) logits.part[k] = logits.part[k] + w.part[k] * values.part[k];
    }
  }
  float lanes[kLanes], logit_lanes[kLanes];
  spill(sums, lanes);
  spill(logits, logit_lanes);
  for (; i < n; ++i) {
    BMT_SCALAR_LOOP;
    const float value = load_one(Type(), x + i);
    lanes[i % kLanes] = lanes[i % kLanes] + bmt::exponential(value - shift);
    if (kSums != bmt::kNoSum) {
      const float term = kSums == bmt::kPlainSum ? value : weights[i] * value;
      logit_lanes[i % kLanes] = logit_lanes[i % kLanes] + term;
    }
  }
  sum = sum + add_lanes(lanes);
  if (kSums != bmt::kNoSum) logit_sum = logit_sum + add_lanes(logit_lanes);
}

template <class Type, int kSums>
static bmt::RowStatistics statistics(const void* logits, const float* weights, int64_t n) {
  const auto* x = static_cast<const typename Type::Storage*>(logits);
  bmt::RowStatistics row{-INFINITY, 0.0f, 0.0f};
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = n - begin < kBlock ? n - begin : kBlock;
    const float largest = maximum(row.largest, largest_of<Type>(x + begin, count));
    row.sum = bmt::reshift(row.sum, row.largest, largest);
    row.largest = largest;
    const float* block_weights = kSums == bmt::kWeightedSum ? weights + begin : nullptr;
    add_block<Type, kSums>(x + begin, block_weights, count, bmt::shift_of(largest), row.sum, row.logit_sum);
  }
  return row;
}

template <class Type, int kSums>
BMT_INLINE float gradient_element(const typename Type::Storage* x, const float* weights, int64_t i,
                                  const bmt::GradientRow& row) {
  const float value = bmt::cross_entropy_gradient(load_one(Type(), x + i), row.shift, row.factor);
  if (kSums == bmt::kPlainSum) return value - row.spread;
  if (kSums == bmt::kWeightedSum) return value - row.spread * weights[i];
  return value;
}

template <class Type, int kSums>
static void gradient(const void* logits, void* out, const float* weights, int64_t n,
                                      const bmt::GradientRow& row) {
  const auto* x = static_cast<const typename Type::Storage*>(logits);
  auto* to = static_cast<typename Type::Storage*>(out);
  // The target's gradient is made first: the results may take the logits' place.
  const bool hit = row.column >= 0 && row.column < n;
  const float at_target = hit ? gradient_element<Type, kSums>(x, weights, row.column, row) - row.hit : 0.0f;
  const Part shift = part_of(row.shift), factor = part_of(row.factor), spread = part_of(row.spread);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Lanes values = load_lanes(Type(), x + i);
    for (int k = 0; k < kParts; ++k) values.part[k] = bmt::cross_entropy_gradient(values.part[k], shift, factor);
    if (kSums == bmt::kPlainSum) {
      for (int k = 0; k < kParts; ++k) values.part[k] = values.part[k] - spread;
    } else if (kSums == bmt::kWeightedSum) {
      const Lanes w = load_lanes(F32(), weights + i);
      for (int k = 0; k < kParts; ++k) values.part[k] = values.part[k] - spread * w.part[k];
    }
    for (int k = 0; k < kParts; ++k) store_part(Type(), to + i + k * kPartWidth, values.part[k]);
  }
  for (; i < n; ++i) {
    BMT_SCALAR_LOOP;
    store_one(Type(), to + i, gradient_element<Type, kSums>(x, weights, i, row));
  }
  if (hit) store_one(Type(), to + row.column, at_target);
}

}  // namespace cross_entropy

#define BMT_CROSS_ENTROPY_SUMS(function, type)                                             \
  {cross_entropy::function<type, bmt::kNoSum>, cross_entropy::function<type, bmt::kPlainSum>, \
   cross_entropy::function<type, bmt::kWeightedSum>}
#define BMT_CROSS_ENTROPY_DTYPES(function)                                                \
  {BMT_CROSS_ENTROPY_SUMS(function, F32), BMT_CROSS_ENTROPY_SUMS(function, BF16),         \
   BMT_CROSS_ENTROPY_SUMS(function, F16)}
#define BMT_CROSS_ENTROPY_KERNELS \
  { BMT_CROSS_ENTROPY_DTYPES(statistics), BMT_CROSS_ENTROPY_DTYPES(gradient) }
