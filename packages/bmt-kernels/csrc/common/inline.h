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

// Never inlined: for a long function that many kernels call once per block. Its code is compiled once.
#if defined(_MSC_VER)
#define BMT_NOINLINE static __declspec(noinline)
#else
#define BMT_NOINLINE static __attribute__((noinline))
#endif

// In the body of a loop: the compiler does not vectorise the loop. For the remainder after a vector loop, which is
// shorter than a vector. Vectorised remainders were half of the code and of the time to compile.
#if defined(_MSC_VER)
#define BMT_SCALAR_LOOP
#else
#define BMT_SCALAR_LOOP asm volatile("")
#endif
