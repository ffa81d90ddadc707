// AVX-512 (F, BW, VL, DQ): 16 lanes.
#include <immintrin.h>

#include "common/half.h"
#include "cpu/kernels.h"

#define BMT_VECTOR 1
#define BMT_PERMUTES 1

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
BMT_INLINE Vec magnitude(Vec a) { return {_mm512_abs_ps(a.x)}; }
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
BMT_INLINE __m256i round_bf16(Vec a) {
  const __m512i bits = _mm512_castps_si512(a.x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.x, a.x, _CMP_UNORD_Q);
  const __m512i words = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
  return _mm512_cvtepi32_epi16(words);
}
BMT_INLINE void store_bf16(uint16_t* p, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_bf16(a)); }
BMT_INLINE void stream_bf16(uint16_t* p, Vec a) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), round_bf16(a)); }

BMT_INLINE Vec load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
BMT_INLINE __m256i round_f16(Vec a) { return _mm512_cvtps_ph(a.x, _MM_FROUND_TO_NEAREST_INT); }
BMT_INLINE void store_f16(uint16_t* p, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_f16(a)); }
BMT_INLINE void stream_f16(uint16_t* p, Vec a) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), round_f16(a)); }
BMT_INLINE void finish_streams() { _mm_sfence(); }

// A vector in double precision.
struct Wide {
  __m512d low, high;
};

BMT_INLINE Wide wide_zero() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
BMT_INLINE Wide widen(Vec a) {
  return {_mm512_cvtps_pd(_mm512_castps512_ps256(a.x)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(a.x, 1))};
}
BMT_INLINE Wide operator+(Wide a, Wide b) { return {_mm512_add_pd(a.low, b.low), _mm512_add_pd(a.high, b.high)}; }
BMT_INLINE Wide operator*(Wide a, Wide b) { return {_mm512_mul_pd(a.low, b.low), _mm512_mul_pd(a.high, b.high)}; }
// sum + x * x, where x was widened: its square is exact, so fused or not the bits are the same.
BMT_INLINE Wide add_square(Wide sum, Wide x) {
  return {_mm512_fmadd_pd(x.low, x.low, sum.low), _mm512_fmadd_pd(x.high, x.high, sum.high)};
}
BMT_INLINE void store_wide(double* p, Wide a) {
  _mm512_storeu_pd(p, a.low);
  _mm512_storeu_pd(p + 8, a.high);
}

// Sixteen 32-bit integers.
struct Ints {
  __m512i x;
};

BMT_INLINE Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.x, b.x)}; }
BMT_INLINE Ints operator-(Ints a, Ints b) { return {_mm512_sub_epi32(a.x, b.x)}; }
BMT_INLINE Ints operator&(Ints a, Ints b) { return {_mm512_and_si512(a.x, b.x)}; }
BMT_INLINE Ints operator^(Ints a, Ints b) { return {_mm512_xor_si512(a.x, b.x)}; }
BMT_INLINE Ints constant(int32_t a, Ints) { return {_mm512_set1_epi32(a)}; }
BMT_INLINE Ints larger(Ints a, Ints b) { return {_mm512_max_epi32(a.x, b.x)}; }
BMT_INLINE Ints smaller(Ints a, Ints b) { return {_mm512_min_epi32(a.x, b.x)}; }
BMT_INLINE Ints sign_mask(Ints a) { return {_mm512_srai_epi32(a.x, 31)}; }
template <int kBits>
BMT_INLINE Ints shift_down(Ints a) {
  return {_mm512_srli_epi32(a.x, kBits)};
}
BMT_INLINE Ints pattern_of(Vec a) { return {_mm512_castps_si512(a.x)}; }

BMT_INLINE Ints gather(const uint32_t* table, Ints i) { return {_mm512_i32gather_epi32(i.x, table, 4)}; }

BMT_INLINE Vec number_of(Ints a) { return {_mm512_castsi512_ps(a.x)}; }
// a * b + c, rounded once.
BMT_INLINE Vec fused(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
BMT_INLINE Vec smaller(Vec a, Vec b) { return {_mm512_min_ps(a.x, b.x)}; }
BMT_INLINE Vec larger(Vec a, Vec b) { return {_mm512_max_ps(a.x, b.x)}; }
// a with its sign changed where b is negative.
BMT_INLINE Vec flipped_like(Vec a, Vec b) {
  constexpr int kAXorBAndC = 0x78;
  return number_of({_mm512_ternarylogic_epi32(_mm512_castps_si512(a.x), _mm512_castps_si512(b.x),
                                              _mm512_set1_epi32(INT32_MIN), kAXorBAndC)});
}
// The number without its mantissa; 0 of 0.
BMT_INLINE Vec power_of_two_in(Vec a) {
  return {_mm512_and_ps(a.x, _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int32_t>(0xff800000u))))};
}
BMT_INLINE Ints magnitude_at_least(Vec a, Ints least) {
  constexpr int kLargerMagnitudeWithoutSign = 0b1011;
  return pattern_of({_mm512_range_ps(a.x, _mm512_castsi512_ps(least.x), kLargerMagnitudeWithoutSign)});
}
// Whether a lane of any of the four has none of the bits.
BMT_INLINE bool any_without(int32_t bits, Ints a, Ints b, Ints c, Ints d) {
  const __m512i all = _mm512_set1_epi32(bits);
  return (_mm512_testn_epi32_mask(a.x, all) | _mm512_testn_epi32_mask(b.x, all) | _mm512_testn_epi32_mask(c.x, all) |
          _mm512_testn_epi32_mask(d.x, all)) != 0;
}
// Tables in one or two registers; the index is taken modulo their length.
BMT_INLINE Vec choose(const float (&table)[16], Ints i) { return {_mm512_permutexvar_ps(i.x, _mm512_loadu_ps(table))}; }
BMT_INLINE Ints choose(const uint32_t (&table)[32], Ints i) {
  return {_mm512_permutex2var_epi32(_mm512_loadu_si512(table), i.x, _mm512_loadu_si512(table + 16))};
}

BMT_INLINE Ints load_codes(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
// Of each lane the eight bits in front of the last kShift, one vector's after the other's.
template <int kShift>
BMT_INLINE void store_codes(uint8_t* p, Ints a, Ints b, Ints c, Ints d) {
  const auto select = [](int32_t bits, __m512i set, __m512i clear) __attribute__((always_inline)) {
    constexpr int kAChoosesBOrC = 0xca;
    return _mm512_ternarylogic_epi32(_mm512_set1_epi32(bits), set, clear, kAChoosesBOrC);
  };
  const auto byte = [](Ints x, int left) __attribute__((always_inline)) {
    return left < 0 ? _mm512_srli_epi32(x.x, static_cast<unsigned>(-left))
                    : _mm512_slli_epi32(x.x, static_cast<unsigned>(left));
  };
  const __m512i low = select(0xff, byte(a, -kShift), byte(b, 8 - kShift));
  const __m512i high = select(0xff0000, byte(c, 16 - kShift), byte(d, 24 - kShift));
  const __m512i lanes = select(0xffff, low, high);  // one lane of each vector
  const __m512i by_vector = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m512i quarters = _mm512_shuffle_epi8(lanes, by_vector);
  const __m512i together = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi32(together, quarters));
}
BMT_INLINE int32_t largest_lane(Ints a) { return _mm512_reduce_max_epi32(a.x); }

#include "cpu/kernels.inl"

}  // namespace

const bmt::Kernels bmt::kAvx512Kernels = BMT_KERNELS("avx512");
