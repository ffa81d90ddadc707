// What Python hands to a kernel: tables of rows of 64-bit integers, one row per tensor.
// The same layout serves the CPU and the CUDA module; _tables.py builds it where pack.cpp cannot.
#pragma once

#include <cstdint>

namespace bmt {

enum class DType : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

constexpr int kDTypes = 3;

// The master weight is `weight` and the half-precision parameter `copy`; without a master, the parameter
// itself is `weight` and `copy` is 0.
struct AdamRow {
  int64_t weight;
  int64_t copy;
  int64_t grad;
  int64_t exp_avg;
  int64_t exp_avg_sq;
  int64_t numel;
  int64_t kinds;  // dtype of weight | dtype of copy << 8 | dtype of grad << 16
};
static_assert(sizeof(AdamRow) == 7 * sizeof(int64_t), "rows are read from a packed table");

struct DataRow {
  int64_t data;
  int64_t numel;
  int64_t dtype;
};
static_assert(sizeof(DataRow) == 3 * sizeof(int64_t), "rows are read from a packed table");

// How a row's parameter is stored: which arrays are read and written. One kernel is compiled for each.
enum WeightKind { kFp32, kBf16, kFp16, kFp32CopyBf16, kFp32CopyFp16, kWeightKinds };

inline int weight_kind(const AdamRow& row) {
  if (row.copy == 0) return static_cast<int>(row.kinds & 0xff);
  return static_cast<DType>((row.kinds >> 8) & 0xff) == DType::kBFloat16 ? kFp32CopyBf16 : kFp32CopyFp16;
}

inline int grad_kind(const AdamRow& row) { return static_cast<int>((row.kinds >> 16) & 0xff); }

}  // namespace bmt
