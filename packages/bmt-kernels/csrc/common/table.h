// What Python hands to a kernel: tables of rows of 64-bit integers, one row per tensor.
// The same layout serves the CPU and the CUDA module; _tables.py builds it where the compiled readers cannot.
#pragma once

#include <cstdint>

#include "common/inline.h"

namespace bmt {

enum class DType : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

constexpr int kDTypes = 3;

template <class T>
BMT_INLINE T* address(int64_t value) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(value));
}

// The address of an element of an array, or null where there is no array: arithmetic on null is undefined.
template <class T>
BMT_INLINE T* element(int64_t array, int64_t index) {
  return array == 0 ? nullptr : address<T>(array) + index;
}

// Where there is no copy, nothing is written through its pointer, which counts on in an array that is there.
template <class Row>
BMT_INLINE int64_t copy_or_weight(const Row& row) {
  return row.copy != 0 ? row.copy : row.weight;
}

inline int64_t item_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

struct DataRow {
  int64_t data;
  int64_t numel;
  int64_t dtype;
};
static_assert(sizeof(DataRow) == 3 * sizeof(int64_t), "rows are read from a packed table");

}  // namespace bmt
