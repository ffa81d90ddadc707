// Many tensors in one launch: up to kMaxRows<Row> rows travel by value in the kernel's arguments, so that nothing is
// copied to the device, and each thread block finds its row and its chunk of it by its index.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <utility>

namespace bmt {

constexpr int kThreads = 256;
constexpr int64_t kChunk = 8192;  // elements that a thread block takes at once
// Elements that a thread takes at once: four fp32 numbers fill a 128-bit access. Eight numbers in half precision would,
// too, but then a warp's accesses to fp32 arrays beside them would have gaps.
constexpr int kNeighbours = 4;

// What kernel<<<blocks, threads, 0, stream>>>(arguments...) does, in words that a C++ compiler knows, too: the tests
// compile the kernels for the host.
template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream,
                          Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

// How many thread blocks of a kernel the current device runs at once.
template <class Kernel>
cudaError_t resident_blocks(Kernel kernel, int threads, unsigned& blocks) {
  int device = 0;
  int processors = 0;
  int of_each = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_each, kernel, threads, 0);
  blocks = static_cast<unsigned>(processors * of_each);
  return error;
}

constexpr size_t kArgumentBytes = 4096;  // of a kernel
// As many as these hold, beside 320 bytes for what else the kernel takes. A row needs a 32-bit number and a bit, too.
template <class Row>
constexpr int kMaxRows = static_cast<int>((kArgumentBytes - 320) / (sizeof(Row) + sizeof(uint32_t) + 1));

// Chunks of all rows together, over however many launches.
template <class Row>
int64_t chunks_of_rows(const Row* rows, int64_t count) {
  int64_t chunks = 0;
  for (int64_t i = 0; i < count; ++i) chunks += (rows[i].numel + kChunk - 1) / kChunk;
  return chunks;
}

template <class Row>
struct Batch {
  Row rows[kMaxRows<Row>];
  uint32_t first_block[kMaxRows<Row> + 1];
  int32_t count;
  bool aligned[kMaxRows<Row>];  // every array of the row starts where kNeighbours may be moved at once
};

// Of a Batch, or of anything else that has count and first_block.
template <class Rows>
__device__ __forceinline__ int row_of_block(const Rows& batch, unsigned block = blockIdx.x) {
  int low = 0;
  int high = batch.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (batch.first_block[middle] <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Elements [begin, begin + n) of the row are this chunk.
template <class Row>
__device__ __forceinline__ void chunk_of_block(const Batch<Row>& batch, int row, int64_t& begin, int& n,
                                               unsigned block = blockIdx.x) {
  begin = static_cast<int64_t>(block - batch.first_block[row]) * kChunk;
  const int64_t left = batch.rows[row].numel - begin;
  n = static_cast<int>(left < kChunk ? left : kChunk);
}

// N neighbouring elements, moved with 128-bit accesses where they are that long.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T at[N];
};

template <class T, int N>
__device__ __forceinline__ Pack<T, N> load_pack(const T* p) {
  return *reinterpret_cast<const Pack<T, N>*>(p);
}

template <class T, int N>
__device__ __forceinline__ void store_pack(T* p, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(p) = pack;
}

// Collects rows and calls launch(batch, blocks), which returns an error, for every full batch and, in flush, for what is
// left.
template <class Row, class Launch>
class Batcher {
 public:
  explicit Batcher(Launch launch) : launch_(launch) { clear(); }

  cudaError_t add(const Row& row, bool aligned) { return add(row, aligned, (row.numel + kChunk - 1) / kChunk); }

  // With a number of thread blocks of its own.
  cudaError_t add(const Row& row, bool aligned, int64_t blocks_of_row) {
    const auto blocks = static_cast<uint64_t>(blocks_of_row);
    if (blocks == 0) return cudaSuccess;
    if (batch_.count == kMaxRows<Row> || blocks_ + blocks > 0x7fffffffull) {
      const cudaError_t error = flush();
      if (error != cudaSuccess) return error;
    }
    if (blocks > 0x7fffffffull) return cudaErrorInvalidConfiguration;
    batch_.rows[batch_.count] = row;
    batch_.aligned[batch_.count] = aligned;
    blocks_ += blocks;
    batch_.first_block[++batch_.count] = static_cast<uint32_t>(blocks_);
    return cudaSuccess;
  }

  cudaError_t flush() {
    if (batch_.count == 0) return cudaSuccess;
    const cudaError_t error = launch_(batch_, static_cast<unsigned>(blocks_));
    clear();
    return error;
  }

 private:
  void clear() {
    batch_.count = 0;
    batch_.first_block[0] = 0;
    blocks_ = 0;
  }

  Launch launch_;
  Batch<Row> batch_;
  uint64_t blocks_;
};

inline bool aligned16(int64_t address) { return address % 16 == 0; }

}  // namespace bmt
