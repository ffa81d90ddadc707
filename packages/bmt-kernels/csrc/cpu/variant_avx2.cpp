// AVX2 with the F16C conversions: 8 lanes.
#include <immintrin.h>

#include "common/half.h"
#include "cpu/kernels.h"

#define BMT_VECTOR 1
#define BMT_PERMUTES 0

namespace {

constexpr int kWidth = 8;

struct Vec {
  __m256 x;
};

BMT_INLINE Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.x, b.x)}; }
BMT_INLINE Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.x, b.x)}; }
BMT_INLINE Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.x, b.x)}; }
BMT_INLINE Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.x, b.x)}; }
BMT_INLINE Vec square_root(Vec a) { return {_mm256_sqrt_ps(a.x)}; }
BMT_INLINE Vec magnitude(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.x)}; }
BMT_INLINE Vec spread(float a) { return {_mm256_set1_ps(a)}; }
BMT_INLINE Vec constant(Vec, float a) { return spread(a); }
BMT_INLINE Vec maximum(Vec a, Vec b) { return {_mm256_max_ps(a.x, b.x)}; }
BMT_INLINE Vec minimum(Vec a, Vec b) { return {_mm256_min_ps(a.x, b.x)}; }
BMT_INLINE Vec power_of_two(Vec a) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(a.x), 23);
  return {_mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3f800000)))};
}

BMT_INLINE Vec load_f32(const float* p) { return {_mm256_loadu_ps(p)}; }
BMT_INLINE void store_f32(float* p, Vec a) { _mm256_storeu_ps(p, a.x); }

BMT_INLINE Vec load_bf16(const uint16_t* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}

// float_to_bf16 of half.h, eight at a time.
BMT_INLINE __m128i round_bf16(Vec a) {
  const __m256i bits = _mm256_castps_si256(a.x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.x, a.x, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
  return _mm256_castsi256_si128(packed);
}
BMT_INLINE void store_bf16(uint16_t* p, Vec a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), round_bf16(a)); }
BMT_INLINE void stream_bf16(uint16_t* p, Vec a) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), round_bf16(a)); }

BMT_INLINE Vec load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
BMT_INLINE __m128i round_f16(Vec a) { return _mm256_cvtps_ph(a.x, _MM_FROUND_TO_NEAREST_INT); }
BMT_INLINE void store_f16(uint16_t* p, Vec a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), round_f16(a)); }
BMT_INLINE void stream_f16(uint16_t* p, Vec a) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), round_f16(a)); }
BMT_INLINE void finish_streams() { _mm_sfence(); }

// A vector in double precision.
struct Wide {
  __m256d low, high;
};

BMT_INLINE Wide wide_zero() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }
BMT_INLINE Wide widen(Vec a) {
  return {_mm256_cvtps_pd(_mm256_castps256_ps128(a.x)), _mm256_cvtps_pd(_mm256_extractf128_ps(a.x, 1))};
}
BMT_INLINE Wide operator+(Wide a, Wide b) { return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)}; }
BMT_INLINE Wide operator*(Wide a, Wide b) { return {_mm256_mul_pd(a.low, b.low), _mm256_mul_pd(a.high, b.high)}; }
// sum + x * x, where x was widened: its square is exact, so fused or not the bits are the same.
BMT_INLINE Wide add_square(Wide sum, Wide x) {
  return sum + x * x;
}
BMT_INLINE void store_wide(double* p, Wide a) {
  _mm256_storeu_pd(p, a.low);
  _mm256_storeu_pd(p + 4, a.high);
}

// Eight 32-bit integers.
struct Ints {
  __m256i x;
};

BMT_INLINE Ints operator+(Ints a, Ints b) { return {_mm256_add_epi32(a.x, b.x)}; }
BMT_INLINE Ints operator-(Ints a, Ints b) { return {_mm256_sub_epi32(a.x, b.x)}; }
BMT_INLINE Ints operator&(Ints a, Ints b) { return {_mm256_and_si256(a.x, b.x)}; }
BMT_INLINE Ints operator^(Ints a, Ints b) { return {_mm256_xor_si256(a.x, b.x)}; }
BMT_INLINE Ints constant(int32_t a, Ints) { return {_mm256_set1_epi32(a)}; }
BMT_INLINE Ints larger(Ints a, Ints b) { return {_mm256_max_epi32(a.x, b.x)}; }
BMT_INLINE Ints smaller(Ints a, Ints b) { return {_mm256_min_epi32(a.x, b.x)}; }
BMT_INLINE Ints sign_mask(Ints a) { return {_mm256_srai_epi32(a.x, 31)}; }
template <int kBits>
BMT_INLINE Ints shift_down(Ints a) {
  return {_mm256_srli_epi32(a.x, kBits)};
}
BMT_INLINE Ints pattern_of(Vec a) { return {_mm256_castps_si256(a.x)}; }

BMT_INLINE Ints gather(const uint32_t* table, Ints i) {
  return {_mm256_i32gather_epi32(reinterpret_cast<const int*>(table), i.x, 4)};
}
BMT_INLINE Vec lookup(const float (&table)[256], Ints i) { return {_mm256_i32gather_ps(table, i.x, 4)}; }

BMT_INLINE Ints load_codes(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
}
// Of each lane the eight bits in front of the last kShift, one vector's after the other's.
template <int kShift>
BMT_INLINE void store_codes(uint8_t* p, Ints a, Ints b, Ints c, Ints d) {
  const auto byte = [](Ints x) __attribute__((always_inline)) {
    return _mm256_and_si256(_mm256_srli_epi32(x.x, kShift), _mm256_set1_epi32(0xff));
  };
  const __m256i words = _mm256_packus_epi16(_mm256_packus_epi32(byte(a), byte(b)), _mm256_packus_epi32(byte(c), byte(d)));
  const __m256i together = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(words, together));
}
BMT_INLINE int32_t largest_lane(Ints a) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(a.x), _mm256_extracti128_si256(a.x, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
}

#include "cpu/kernels.inl"

}  // namespace

const bmt::Kernels bmt::kAvx2Kernels = BMT_KERNELS("avx2");
