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

BMT_INLINE int32_t magnitude_of(float x) { return static_cast<int32_t>(bmt::float_bits(x) & 0x7fffffffu); }

#if BMT_VECTOR
BMT_INLINE Ints magnitude_of(Vec x) { return pattern_of(x) & constant(0x7fffffff, Ints()); }
#endif

#if BMT_PERMUTES
static constexpr bmt::Fractions kSignedFractions = bmt::make_fractions(true);
static constexpr bmt::Fractions kUnsignedFractions = bmt::make_fractions(false);
static constexpr bmt::Lines kSignedLines = bmt::make_lines(true);
static constexpr bmt::Lines kUnsignedLines = bmt::make_lines(false);

// The entries of codes, by the fractions of quantize_lines.h.
template <bool kSigned>
BMT_INLINE Vec map_entries(const uint8_t* codes) {
  const bmt::Fractions& fractions = kSigned ? kSignedFractions : kUnsignedFractions;
  const Ints pattern = load_codes(codes) + constant(bmt::kPlacePattern, Ints());
  const Vec place = number_of(pattern) - spread(bmt::place_origin(kSigned));
  const Ints index = shift_down<23>(pattern_of(place));
  const Vec power = power_of_two_in(place);
  const Vec all = spread(bmt::kNumeratorOfAll);
  const Vec rest = fused(power, spread(bmt::kNumeratorOfPower), kSigned ? flipped_like(all, place) : all);
  const Vec numerator = fused(place, spread(bmt::kNumeratorOfPlace), rest);
  return fused(numerator, choose(fractions.high, index), numerator * choose(fractions.low, index));
}

// The codes of normalized numbers, by the lines of quantize_lines.h.
template <bool kSigned>
BMT_INLINE Ints nearest_codes(Vec y) {
  const bmt::Lines& lines = kSigned ? kSignedLines : kUnsignedLines;
  const Ints least = constant(bmt::kSegmentLeast, Ints());
  const Ints x = kSigned ? magnitude_at_least(y, least) : larger(pattern_of(y), least);
  const Ints word = choose(lines.segments, shift_down<bmt::kSegmentShift>(x));
  const Ints exchanged = x + word;
  const Vec limit = power_of_two_in(number_of(exchanged));
  const Vec intercept = fused(limit, spread(bmt::kInterceptOfLimit), spread(bmt::kIntercept));
  const Vec slope = choose(lines.slope, shift_down<bmt::kSegmentShift>(exchanged));
  Vec line = smaller(fused(number_of(x), slope, intercept), limit);
  if (kSigned) {
    line = larger(flipped_like(line - spread(1.0f), y) + spread(bmt::kSignedOrigin), spread(bmt::kLeastSigned));
  } else {
    line = line + spread(bmt::kUnsignedOrigin);
  }
  const Ints bits = pattern_of(line);
  if (__builtin_expect(any_without(bits, constant(bmt::kFarFromInteger, bits)), 0)) {
    return nearest_code<kSigned>(pattern_of(y));
  }
  return shift_down<bmt::kFractionBits>(bits);  // and more in front of the last eight bits
}
#elif BMT_VECTOR
template <bool kSigned>
BMT_INLINE Vec map_entries(const uint8_t* codes) {
  return lookup((kSigned ? kSignedMap : kUnsignedMap).at, load_codes(codes));
}

template <bool kSigned>
BMT_INLINE Ints nearest_codes(Vec y) {
  return nearest_code<kSigned>(pattern_of(y));
}
#endif

// The codes of n <= kQuantBlock values, given their largest magnitude. Returns the absmax to be stored. The values may
// be overwritten.
template <bool kSigned>
BMT_INLINE float quantize_block(float* __restrict x, int n, int32_t magnitude, uint8_t* __restrict codes) {
  const BlockScale scale = bmt::block_scale(magnitude);
  if (!scale.regular) {
    for (int i = 0; i < n; ++i) codes[i] = kSigned ? bmt::kSignedZero : bmt::kUnsignedZero;
    return scale.absmax;
  }
  if (scale.power != 1.0f) {
    for (int i = 0; i < n; ++i) x[i] = x[i] * scale.power;
  }
  int i = 0;
#if BMT_VECTOR
  const Vec inverse = spread(scale.inverse);
  for (; i + kWidth <= n; i += kWidth) store_codes(codes + i, nearest_codes<kSigned>(load_f32(x + i) * inverse));
#endif
  for (; i < n; ++i) {
    const float y = x[i] * scale.inverse;
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
