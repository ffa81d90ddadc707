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

// The codes of normalized numbers, by the lines of quantize_lines.h: eight bits in front of the last kFractionBits.
template <bool kSigned>
BMT_INLINE Ints code_and_fraction(Vec y) {
  const bmt::Lines& lines = kSigned ? kSignedLines : kUnsignedLines;
  const Ints least = constant(bmt::kSegmentLeast, Ints());
  const Ints x = kSigned ? magnitude_at_least(y, least) : larger(pattern_of(y), least);
  const Ints exchanged = x + choose(lines.segments, shift_down<bmt::kSegmentShift>(x));
  const Vec limit = power_of_two_in(number_of(exchanged));
  const Vec intercept = fused(limit, spread(bmt::kInterceptOfLimit), spread(bmt::kIntercept));
  const Vec slope = choose(lines.slope, shift_down<bmt::kSegmentShift>(exchanged));
  const Vec line = smaller(fused(number_of(x), slope, intercept), limit);
  if (!kSigned) return pattern_of(line + spread(bmt::kUnsignedOrigin));
  const Vec counted = flipped_like(line - spread(1.0f), y) + spread(bmt::kSignedOrigin);
  return pattern_of(larger(counted, spread(bmt::kLeastSigned)));
}

template <bool kSigned>
BMT_INLINE void store_nearest(uint8_t* codes, const Vec (&y)[4]) {
  const Ints a = code_and_fraction<kSigned>(y[0]);
  const Ints b = code_and_fraction<kSigned>(y[1]);
  const Ints c = code_and_fraction<kSigned>(y[2]);
  const Ints d = code_and_fraction<kSigned>(y[3]);
  if (__builtin_expect(any_without(bmt::kFarFromInteger, a, b, c, d), 0)) {
    store_codes<0>(codes, nearest_code<kSigned>(pattern_of(y[0])), nearest_code<kSigned>(pattern_of(y[1])),
                   nearest_code<kSigned>(pattern_of(y[2])), nearest_code<kSigned>(pattern_of(y[3])));
  } else {
    store_codes<bmt::kFractionBits>(codes, a, b, c, d);
  }
}
#elif BMT_VECTOR
template <bool kSigned>
BMT_INLINE Vec map_entries(const uint8_t* codes) {
  return lookup((kSigned ? kSignedMap : kUnsignedMap).at, load_codes(codes));
}

template <bool kSigned>
BMT_INLINE void store_nearest(uint8_t* codes, const Vec (&y)[4]) {
  store_codes<0>(codes, nearest_code<kSigned>(pattern_of(y[0])), nearest_code<kSigned>(pattern_of(y[1])),
                 nearest_code<kSigned>(pattern_of(y[2])), nearest_code<kSigned>(pattern_of(y[3])));
}
#endif

// The codes of n <= kQuantBlock values. The values, in an array of kQuantBlock, are overwritten.
template <bool kSigned>
BMT_NOINLINE void quantize_block(float* __restrict x, int n, const BlockScale& scale, uint8_t* __restrict codes) {
  if (!scale.regular) {
    for (int i = 0; i < n; ++i) codes[i] = kSigned ? bmt::kSignedZero : bmt::kUnsignedZero;
    return;
  }
  if (scale.power != 1.0f) {
    for (int i = 0; i < n; ++i) x[i] = x[i] * scale.power;
  }
#if BMT_VECTOR
  constexpr int kGroup = 4 * kWidth;
  const Vec inverse = spread(scale.inverse);
  const auto store_group = [&](uint8_t* to, const float* from) __attribute__((always_inline)) {
    const Vec y[4] = {load_f32(from) * inverse, load_f32(from + kWidth) * inverse, load_f32(from + 2 * kWidth) * inverse,
                      load_f32(from + 3 * kWidth) * inverse};
    store_nearest<kSigned>(to, y);
  };
  int i = 0;
  for (; i + kGroup <= n; i += kGroup) store_group(codes + i, x + i);
  if (i < n) {
    uint8_t rest[kGroup];
    for (int j = n; j < i + kGroup; ++j) x[j] = 0.0f;
    store_group(rest, x + i);
    for (int j = i; j < n; ++j) codes[j] = rest[j - i];
  }
#else
  for (int i = 0; i < n; ++i) {
    const float y = x[i] * scale.inverse;
    codes[i] = static_cast<uint8_t>(nearest_code<kSigned>(static_cast<int32_t>(bmt::float_bits(y))));
  }
#endif
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
      BMT_REMAINDER;
      x[i] = load_one(Value(), values + i);
      magnitude = bmt::larger(magnitude, magnitude_of(x[i]));
    }
    const BlockScale scale = bmt::block_scale(magnitude);
    absmax[block / kQuantBlock] = scale.absmax;
    quantize_block<kSigned>(x, n, scale, address<uint8_t>(row.codes + begin));
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
    for (; i < n; ++i) {
      BMT_REMAINDER;
      store_one(Value(), values + i, map_entry<kSigned>(codes[i]) * scale);
    }
  }
}

#define BMT_QUANTIZE_ROWS(function)                                                                  \
  {                                                                                                  \
    {function<F32, false>, function<F32, true>}, {function<BF16, false>, function<BF16, true>},      \
        {function<F16, false>, function<F16, true>}                                                  \
  }
#define BMT_QUANTIZE_KERNELS {BMT_QUANTIZE_ROWS(quantize), BMT_QUANTIZE_ROWS(dequantize)}
