// Functions shared by the CPU variants and the CUDA kernels.
//
// `static` and always inlined: the same header is compiled once per instruction set, and a function that
// the linker may merge across those objects (a weak symbol) could bring AVX-512 code into the portable path.
#pragma once

#if defined(__CUDACC__)
#define BMT_INLINE static __host__ __device__ __forceinline__
#elif defined(_MSC_VER)
#define BMT_INLINE static __forceinline
#else
#define BMT_INLINE static inline __attribute__((always_inline))
#endif
