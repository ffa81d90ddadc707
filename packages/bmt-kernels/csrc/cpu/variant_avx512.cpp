// AVX-512 (F, BW, VL, DQ): 16 lanes.
#include <immintrin.h>

#include "common/half.h"
#include "cpu/kernels.h"

#define BMT_VECTOR 1

namespace {

constexpr int kWidth = 16;

struct Vec {
  __m512 x;
};

BMT_INLINE Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.x, b.x)}; }
BMT_INLINE Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.x, b.x)}; }
BMT_INLINE Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.x, b.x)}; }
BMT_INLINE Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.x, b.x)}; }
BMT_INLINE Vec square_root(Vec a) { return {_mm512_sqrt_ps(a.x)}; }
BMT_INLINE Vec spread(float a) { return {_mm512_set1_ps(a)}; }
BMT_INLINE Vec constant(Vec, float a) { return spread(a); }
BMT_INLINE Vec maximum(Vec a, Vec b) { return {_mm512_max_ps(a.x, b.x)}; }
BMT_INLINE Vec minimum(Vec a, Vec b) { return {_mm512_min_ps(a.x, b.x)}; }
BMT_INLINE Vec power_of_two(Vec a) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(a.x), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(0x3f800000)))};
}

BMT_INLINE Vec load_f32(const float* p) { return {_mm512_loadu_ps(p)}; }
BMT_INLINE void store_f32(float* p, Vec a) { _mm512_storeu_ps(p, a.x); }

BMT_INLINE Vec load_bf16(const uint16_t* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}

// float_to_bf16 of half.h, sixteen at a time. The processor's own conversion flushes subnormals to zero.
BMT_INLINE void store_bf16(uint16_t* p, Vec a) {
  const __m512i bits = _mm512_castps_si512(a.x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.x, a.x, _CMP_UNORD_Q);
  const __m512i words = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(words));
}

BMT_INLINE Vec load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
BMT_INLINE void store_f16(uint16_t* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.x, _MM_FROUND_TO_NEAREST_INT));
}

#include "cpu/kernels.inl"

}  // namespace

const bmt::Kernels bmt::kAvx512Kernels = BMT_KERNELS("avx512");
