// Numbers that travel between ranks in 8 bits: threads, Python.
#include "cpu/bindings.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace bmt {
namespace {

namespace py = pybind11;

using PackFunction = void (*)(const PackRow& row, int64_t first, int64_t last);

void run_blocks(PackFunction function, const PackRow& row, int threads) {
  struct Context {
    PackFunction function;
    PackRow row;
  } context{function, row};
  py::gil_scoped_release release;
  run_parts(
      useful_threads(row.numel, threads),
      [](void* pointer, int part, int parts) {
        const Context& c = *static_cast<const Context*>(pointer);
        const int64_t blocks = (c.row.numel + c.row.block - 1) / c.row.block;
        c.function(c.row, blocks * part / parts, blocks * (part + 1) / parts);
      },
      &context);
}

void pack_blocks(int variant, int64_t values, int dtype, int64_t numbers, int64_t scales, int64_t block, int64_t numel,
                 bool float8, int threads) {
  run_blocks(kernels_at(variant).packing.pack[dtype][float8], {values, numbers, scales, block, numel}, threads);
}

void unpack_blocks(int variant, int64_t values, int dtype, int64_t numbers, int64_t scales, int64_t block,
                   int64_t numel, bool float8, bool add, int threads) {
  run_blocks(kernels_at(variant).packing.unpack[dtype][float8][add], {values, numbers, scales, block, numel}, threads);
}

}  // namespace

void bind_packing(py::module_& m) {
  m.def("pack_blocks", &pack_blocks);
  m.def("unpack_blocks", &unpack_blocks);
}

}  // namespace bmt
