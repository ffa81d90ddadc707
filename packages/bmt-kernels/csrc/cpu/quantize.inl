// Block-wise 8-bit numbers: blocks of values to codes and back.

using bmt::BlockScale;
using bmt::kQuantBlock;
using bmt::QuantizeRow;

static constexpr bmt::DynamicMap kSignedMap = bmt::dynamic_map(true);
static constexpr bmt::DynamicMap kUnsignedMap = bmt::dynamic_map(false);
static constexpr bmt::Buckets<bmt::kSignedBuckets> kSignedBuckets = bmt::signed_buckets();
static constexpr bmt::Buckets<bmt::kUnsignedBuckets> kUnsignedBuckets = bmt::unsigned_buckets();

template <bool kSigned>
BMT_INLINE float map_entry(uint8_t code) {
  return (kSigned ? kSignedMap : kUnsignedMap).at[code];
}

template <bool kSigned, class Int>
BMT_INLINE Int nearest_code(Int pattern) {
  return kSigned ? bmt::nearest_signed(pattern, kSignedBuckets.at)
                 : bmt::nearest_unsigned(pattern, kUnsignedBuckets.at);
}

#if BMT_PERMUTES
static constexpr bmt::Lines kSignedLines = bmt::make_lines(true);
static constexpr bmt::Lines kUnsignedLines = bmt::make_lines(false);

// The codes of normalized numbers, by the lines of quantize.h.
template <bool kSigned>
BMT_INLINE Ints nearest_codes(Vec y) {
  const bmt::Lines& lines = kSigned ? kSignedLines : kUnsignedLines;
  const Ints pattern = pattern_of(y);
  const Ints sign = sign_mask(pattern);
  Ints x = pattern;
  if (kSigned) x = x & constant(0x7fffffff, x);
  x = larger(x, constant(bmt::kSegmentLeast, x));
  const Ints word = choose(lines.segments.at, shift_down<bmt::kSegmentShift>(x));
  const Ints segment = shift_down<bmt::kSegmentShift>(word + (x & constant((1 << bmt::kSegmentShift) - 1, x)));
  const Vec line = number_of(x) * choose(lines.slope, segment) + choose(lines.intercept, segment);
  const Vec place = smaller(line, choose(lines.limit, segment));
  const Ints rank = truncated(place - spread(bmt::kDoubt));
  if (__builtin_expect(differ(rank, truncated(place + spread(bmt::kDoubt))), 0)) return nearest_code<kSigned>(pattern);
  if (!kSigned) return rank;
  const Ints within = smaller(rank, constant(255 - bmt::kSignedZero, rank) + sign);
  return ((within ^ sign) - sign) + constant(bmt::kSignedZero, rank);
}
#elif BMT_VECTOR
template <bool kSigned>
BMT_INLINE Ints nearest_codes(Vec y) {
  return nearest_code<kSigned>(pattern_of(y));
}
#endif

BMT_INLINE int32_t magnitude_of(float x) { return static_cast<int32_t>(bmt::float_bits(x) & 0x7fffffffu); }

#if BMT_VECTOR
template <bool kSigned>
BMT_INLINE Vec map_entries(const uint8_t* codes) {
  return lookup((kSigned ? kSignedMap : kUnsignedMap).at, load_codes(codes));
}
BMT_INLINE Ints magnitude_of(Vec x) { return pattern_of(x) & constant(0x7fffffff, Ints()); }
#endif

// The codes of n <= kQuantBlock values, given their largest magnitude. Returns the absmax to be stored.
template <bool kSigned>
BMT_INLINE float quantize_block(const float* __restrict x, int n, int32_t magnitude, uint8_t* __restrict codes) {
  const BlockScale scale = bmt::block_scale(magnitude);
  if (!scale.regular) {
    for (int i = 0; i < n; ++i) codes[i] = kSigned ? bmt::kSignedZero : bmt::kUnsignedZero;
    return scale.absmax;
  }
  int i = 0;
#if BMT_VECTOR
  const Vec power = spread(scale.power);
  const Vec inverse = spread(scale.inverse);
  for (; i + kWidth <= n; i += kWidth) {
    const Vec y = bmt::normalized(load_f32(x + i), power, inverse);
    store_codes(codes + i, nearest_codes<kSigned>(y));
  }
#endif
  for (; i < n; ++i) {
    const float y = bmt::normalized(x[i], scale.power, scale.inverse);
    codes[i] = static_cast<uint8_t>(nearest_code<kSigned>(static_cast<int32_t>(bmt::float_bits(y))));
  }
  return scale.absmax;
}

template <class Value, bool kSigned>
static void quantize(const QuantizeRow& row, int64_t first, int64_t last) {
  auto* absmax = address<float>(row.absmax);
  alignas(64) float x[kQuantBlock];
  for (int64_t block = first; block < last; block += kQuantBlock) {
    const int64_t begin = block < row.begin ? row.begin : block;
    const int n = static_cast<int>((block + kQuantBlock < last ? block + kQuantBlock : last) - begin);
    const auto* values =
        address<const typename Value::Storage>(row.values + begin * static_cast<int64_t>(sizeof(typename Value::Storage)));
    int32_t magnitude = 0;
    int i = 0;
#if BMT_VECTOR
    Ints magnitudes = constant(0, Ints());
    for (; i + kWidth <= n; i += kWidth) {
      const Vec value = load(Value(), values + i);
      store_f32(x + i, value);
      magnitudes = larger(magnitudes, magnitude_of(value));
    }
    magnitude = largest_lane(magnitudes);
#endif
    for (; i < n; ++i) {
      x[i] = load_one(Value(), values + i);
      magnitude = bmt::larger(magnitude, magnitude_of(x[i]));
    }
    absmax[block / kQuantBlock] = quantize_block<kSigned>(x, n, magnitude, address<uint8_t>(row.codes + begin));
  }
}

template <class Value, bool kSigned>
static void dequantize(const QuantizeRow& row, int64_t first, int64_t last) {
  const auto* absmax = address<const float>(row.absmax);
  for (int64_t block = first; block < last; block += kQuantBlock) {
    const int64_t begin = block < row.begin ? row.begin : block;
    const int n = static_cast<int>((block + kQuantBlock < last ? block + kQuantBlock : last) - begin);
    auto* __restrict values =
        address<typename Value::Storage>(row.values + begin * static_cast<int64_t>(sizeof(typename Value::Storage)));
    const auto* __restrict codes = address<const uint8_t>(row.codes + begin);
    const float scale = absmax[block / kQuantBlock];
    int i = 0;
#if BMT_VECTOR
    for (; i + kWidth <= n; i += kWidth) store(Value(), values + i, map_entries<kSigned>(codes + i) * spread(scale));
#endif
    for (; i < n; ++i) store_one(Value(), values + i, map_entry<kSigned>(codes[i]) * scale);
  }
}

#define BMT_QUANTIZE_ROWS(function)                                                                  \
  {                                                                                                  \
    {function<F32, false>, function<F32, true>}, {function<BF16, false>, function<BF16, true>},      \
        {function<F16, false>, function<F16, true>}                                                  \
  }
#define BMT_QUANTIZE_KERNELS {BMT_QUANTIZE_ROWS(quantize), BMT_QUANTIZE_ROWS(dequantize)}
