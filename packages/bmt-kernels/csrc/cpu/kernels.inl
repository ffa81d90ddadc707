// The CPU loops, compiled once per instruction set. The including file has defined, in this anonymous
// namespace, a vector type Vec with kWidth lanes, operators, square_root, spread, and load/store for each
// storage type. No std:: templates here: their instances would be shared between the variants.

using bmt::AdamFactors;
using bmt::AdamRow;
using bmt::AdamScalars;

struct F32 { using Storage = float; };
struct BF16 { using Storage = uint16_t; };
struct F16 { using Storage = uint16_t; };
struct NoCopy { using Storage = uint16_t; };

BMT_INLINE float load_one(F32, const float* p) { return *p; }
BMT_INLINE float load_one(BF16, const uint16_t* p) { return bmt::bf16_to_float(*p); }
BMT_INLINE float load_one(F16, const uint16_t* p) { return bmt::half_to_float(*p); }
BMT_INLINE void store_one(F32, float* p, float x) { *p = x; }
BMT_INLINE void store_one(BF16, uint16_t* p, float x) { *p = bmt::float_to_bf16(x); }
BMT_INLINE void store_one(F16, uint16_t* p, float x) { *p = bmt::float_to_half(x); }
BMT_INLINE void store_one(NoCopy, uint16_t*, float) {}

#if BMT_VECTOR
BMT_INLINE Vec load(F32, const float* p) { return load_f32(p); }
BMT_INLINE Vec load(BF16, const uint16_t* p) { return load_bf16(p); }
BMT_INLINE Vec load(F16, const uint16_t* p) { return load_f16(p); }
BMT_INLINE void store(F32, float* p, Vec x) { store_f32(p, x); }
BMT_INLINE void store(BF16, uint16_t* p, Vec x) { store_bf16(p, x); }
BMT_INLINE void store(F16, uint16_t* p, Vec x) { store_f16(p, x); }
BMT_INLINE void store(NoCopy, uint16_t*, Vec) {}
#endif

template <class T>
BMT_INLINE T* address(int64_t value) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(value));
}

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

// An element is infinite or NaN exactly if its exponent bits are all ones, that is if its magnitude, as an
// integer, is at least infinity's. The maximum is taken as signed integers, which SSE2 already has.
template <class Unsigned, class Signed, Signed kInfinity>
static bool has_nonfinite(const void* data, int64_t n) {
  constexpr Unsigned kMagnitude = static_cast<Unsigned>(~(Unsigned{1} << (sizeof(Unsigned) * 8 - 1)));
  constexpr int64_t kBlock = 16384;
  const auto* p = static_cast<const Unsigned*>(data);
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = begin + kBlock < n ? begin + kBlock : n;
    Signed largest = 0;
    for (int64_t i = begin; i < end; ++i) {
      const Signed magnitude = static_cast<Signed>(p[i] & kMagnitude);
      largest = magnitude > largest ? magnitude : largest;
    }
    if (largest >= kInfinity) return true;
  }
  return false;
}

#define BMT_ADAM_ROW(weight, copy) {adam<weight, copy, F32>, adam<weight, copy, BF16>, adam<weight, copy, F16>}
#define BMT_KERNELS(variant_name)                                                               \
  {                                                                                             \
    variant_name,                                                                               \
        {BMT_ADAM_ROW(F32, NoCopy), BMT_ADAM_ROW(BF16, NoCopy), BMT_ADAM_ROW(F16, NoCopy),      \
         BMT_ADAM_ROW(F32, BF16), BMT_ADAM_ROW(F32, F16)},                                      \
    {                                                                                           \
      has_nonfinite<uint32_t, int32_t, 0x7f800000>, has_nonfinite<uint16_t, int16_t, 0x7f80>,   \
          has_nonfinite<uint16_t, int16_t, 0x7c00>                                              \
    }                                                                                           \
  }
