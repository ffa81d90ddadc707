// Numbers that travel between ranks in 8 bits.
//
// The loops are plain: a compiler vectorises them.

using bmt::PackRow;

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
    int32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) {
      const auto magnitude = static_cast<int32_t>(bmt::float_bits(load_one(Value(), values + i)) & 0x7fffffffu);
      largest = largest > magnitude ? largest : magnitude;
    }
    const bmt::PackScale scale = bmt::pack_scale<kFloat8>(largest);
    scales[block] = scale.scale;
    const float inverse = scale.inverse;
    if (inverse == 0.0f) {
      for (int64_t i = 0; i < n; ++i) numbers[i] = 0;
      continue;
    }
    for (int64_t i = 0; i < n; ++i) numbers[i] = bmt::pack_number<kFloat8>(load_one(Value(), values + i), inverse);
  }
}

template <class Value, bool kFloat8, bool kAdd>
static void unpack(const PackRow& row, int64_t first, int64_t last) {
  auto* all = address<typename Value::Storage>(row.values);
  const auto* bytes = address<const int8_t>(row.numbers);
  const auto* scales = address<const float>(row.scales);
  for (int64_t block = first; block < last; ++block) {
    const int64_t begin = block * row.block;
    const int64_t n = (begin + row.block < row.numel ? begin + row.block : row.numel) - begin;
    auto* __restrict values = all + begin;
    const int8_t* __restrict numbers = bytes + begin;
    const float scale = scales[block];
    for (int64_t i = 0; i < n; ++i) {
      const float x = bmt::unpack_number<kFloat8>(numbers[i], scale);
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
