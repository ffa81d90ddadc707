// What a variant offers for block-wise 8-bit numbers.
#pragma once

#include "common/quantize_lines.h"
#include "common/table.h"

namespace bmt {

// Elements are counted from the beginning of the first block: element i is at address + i * size. Those before
// `begin` do not exist; `begin` is less than a block.
struct QuantizeRow {
  int64_t values;
  int64_t codes;
  int64_t absmax;  // of the first block
  int64_t begin;
  int64_t numel;   // where the elements end
};

struct QuantizeKernels {
  // Elements [first, last), where first is a multiple of the block size; [dtype of the values][signed].
  void (*quantize[kDTypes][2])(const QuantizeRow& row, int64_t first, int64_t last);
  void (*dequantize[kDTypes][2])(const QuantizeRow& row, int64_t first, int64_t last);
};

}  // namespace bmt
