// How the kernels read and write each dtype. All arithmetic is in fp32.
#pragma once

#include "common/half.h"

namespace bmt {
namespace {

struct F32 {
  using Storage = float;
  static __device__ __forceinline__ float load(float x) { return x; }
  static __device__ __forceinline__ float store(float x) { return x; }
};
struct BF16 {
  using Storage = uint16_t;
  static __device__ __forceinline__ float load(uint16_t x) { return bf16_to_float(x); }
  static __device__ __forceinline__ uint16_t store(float x) { return float_to_bf16(x); }
};
struct F16 {
  using Storage = uint16_t;
  static __device__ __forceinline__ float load(uint16_t x) { return half_to_float(x); }
  static __device__ __forceinline__ uint16_t store(float x) { return float_to_half(x); }
};
struct NoCopy : BF16 {};

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

}  // namespace
}  // namespace bmt
