// Whether part of a row holds an infinity or a NaN.

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

#define BMT_OVERFLOW_KERNELS                                                                \
  {                                                                                         \
    {                                                                                       \
      has_nonfinite<uint32_t, int32_t, 0x7f800000>, has_nonfinite<uint16_t, int16_t, 0x7f80>, \
          has_nonfinite<uint16_t, int16_t, 0x7c00>                                          \
    }                                                                                       \
  }
