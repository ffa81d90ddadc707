// Numbers that travel between ranks in 8 bits: integers, or floats (e4m3), with a scale for each block.
//
// The loops are plain: a compiler vectorises them.

using bmt::PackRow;

// The integer nearest to x (ties to even), |x| <= 2^22: it lands in the last bits of the sum.
BMT_INLINE uint8_t nearest_integer(float x) { return static_cast<uint8_t>(bmt::float_bits(x + 0x1.8p23f)); }

// e4m3, |x| <= 448 but for rounding.
BMT_INLINE uint8_t nearest_float8(float x) {
  const uint32_t bits = bmt::float_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // From 2^-6 up: round at bit 20, then move the exponent from bias 127 to bias 7.
  const uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  // Below: 2^14 has an ulp of 2^-9, the unit of the subnormals, so the addition itself rounds.
  const uint32_t subnormal = bmt::float_bits(bmt::bits_float(magnitude) + 0x1p14f) - 0x46800000u;
  return static_cast<uint8_t>((bits >> 24 & 0x80u) | (magnitude < 0x3c800000u ? subnormal : normal));
}

// A byte as an integer or, with an exponent that is too small by 120, as e4m3; see `unit`.
template <bool kFloat8>
BMT_INLINE float number_of_byte(int8_t byte) {
  if (!kFloat8) return static_cast<float>(byte);
  return bmt::bits_float((static_cast<uint32_t>(static_cast<int32_t>(byte)) << 20) & 0x87f00000u);
}

template <class Value, bool kFloat8>
static void pack(const PackRow& row, int64_t first, int64_t last) {
  const auto* all = address<const typename Value::Storage>(row.values);
  auto* bytes = address<uint8_t>(row.numbers);
  auto* scales = address<float>(row.scales);
  for (int64_t block = first; block < last; ++block) {
    const int64_t begin = block * row.block;
    const int64_t n = (begin + row.block < row.numel ? begin + row.block : row.numel) - begin;
    const auto* __restrict values = all + begin;
    uint8_t* __restrict numbers = bytes + begin;
    int32_t largest = 0;  // as patterns, NaN is above infinity, and both are above all numbers
    for (int64_t i = 0; i < n; ++i) {
      const auto magnitude = static_cast<int32_t>(bmt::float_bits(load_one(Value(), values + i)) & 0x7fffffffu);
      largest = largest > magnitude ? largest : magnitude;
    }
    const bool finite = largest < 0x7f800000;
    float scale = bmt::bits_float(static_cast<uint32_t>(largest)) / (kFloat8 ? 448.0f : 127.0f);
    if (scale < 0x1p-126f) scale = 0.0f;
    scales[block] = finite ? scale : bmt::bits_float(0x7fc00000u);
    const float inverse = finite && scale > 0.0f ? 1.0f / scale : 0.0f;
    if (inverse == 0.0f) {
      for (int64_t i = 0; i < n; ++i) numbers[i] = 0;
      continue;
    }
    for (int64_t i = 0; i < n; ++i) {
      const float x = load_one(Value(), values + i) * inverse;
      numbers[i] = kFloat8 ? nearest_float8(x) : nearest_integer(x);
    }
  }
}

template <class Value, bool kFloat8, bool kAdd>
static void unpack(const PackRow& row, int64_t first, int64_t last) {
  auto* all = address<typename Value::Storage>(row.values);
  const auto* bytes = address<const int8_t>(row.numbers);
  const auto* scales = address<const float>(row.scales);
  const float unit = kFloat8 ? 0x1p120f : 1.0f;
  for (int64_t block = first; block < last; ++block) {
    const int64_t begin = block * row.block;
    const int64_t n = (begin + row.block < row.numel ? begin + row.block : row.numel) - begin;
    auto* __restrict values = all + begin;
    const int8_t* __restrict numbers = bytes + begin;
    const float scale = scales[block];
    for (int64_t i = 0; i < n; ++i) {
      const float x = number_of_byte<kFloat8>(numbers[i]) * unit * scale;
      store_one(Value(), values + i, kAdd ? load_one(Value(), values + i) + x : x);
    }
  }
}

#define BMT_PACK_ROW(value) {pack<value, false>, pack<value, true>}
#define BMT_UNPACK_ROW(value) \
  {{unpack<value, false, false>, unpack<value, false, true>}, {unpack<value, true, false>, unpack<value, true, true>}}
#define BMT_PACK_KERNELS                                    \
  {{BMT_PACK_ROW(F32), BMT_PACK_ROW(BF16), BMT_PACK_ROW(F16)}, \
   {BMT_UNPACK_ROW(F32), BMT_UNPACK_ROW(BF16), BMT_UNPACK_ROW(F16)}}
