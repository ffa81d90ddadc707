// The part of DLPack's stable C interface that reading a tensor takes (dmlc/dlpack, version 1).
#pragma once

#include <cstdint>

namespace bmt::dlpack {

constexpr uint32_t kMajorVersion = 1;
constexpr const char* kCapsuleName = "dlpack_exchange_api";

constexpr int32_t kCpu = 1;
constexpr int32_t kCuda = 2;
constexpr int32_t kCudaHost = 3;  // pinned host memory

constexpr uint8_t kUnsigned = 1;
constexpr uint8_t kFloat = 2;
constexpr uint8_t kBfloat = 4;

struct Tensor {
  void* data;
  struct {
    int32_t type;
    int32_t id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
  } dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct ExchangeApi {
  struct {
    uint32_t major;
    uint32_t minor;
  } version;
  ExchangeApi* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  // Fills in a view that borrows the tensor's shape and strides. 0, or -1 with a Python error set.
  int (*tensor_from_py_object_no_sync)(void* py_object, Tensor* out);
  void* current_work_stream;
};

}  // namespace bmt::dlpack
