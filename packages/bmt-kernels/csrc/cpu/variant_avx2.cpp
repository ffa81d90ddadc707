// AVX2 with the F16C conversions: 8 lanes.
#include <immintrin.h>

#include "common/half.h"
#include "cpu/kernels.h"

#define BMT_VECTOR 1

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
BMT_INLINE void store_bf16(uint16_t* p, Vec a) {
  const __m256i bits = _mm256_castps_si256(a.x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.x, a.x, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

BMT_INLINE Vec load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
BMT_INLINE void store_f16(uint16_t* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.x, _MM_FROUND_TO_NEAREST_INT));
}

#include "cpu/kernels.inl"

}  // namespace

const bmt::Kernels bmt::kAvx2Kernels = BMT_KERNELS("avx2");
