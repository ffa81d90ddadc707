// In a loop that is the remainder of a vector loop where there are vectors, and the whole loop where there are none.
#if BMT_VECTOR
#define BMT_REMAINDER BMT_SCALAR_LOOP
#else
#define BMT_REMAINDER
#endif

// How the loops read and write each dtype: one element, or a vector of them. All arithmetic is in fp32.

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

// Past the caches, to addresses that are multiples of the vector's size; finish_streams() orders them before what
// follows.
BMT_INLINE void stream(BF16, uint16_t* p, Vec x) { stream_bf16(p, x); }
BMT_INLINE void stream(F16, uint16_t* p, Vec x) { stream_f16(p, x); }
BMT_INLINE void stream(NoCopy, uint16_t*, Vec) {}
#endif
