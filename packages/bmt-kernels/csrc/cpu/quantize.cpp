// Block-wise 8-bit numbers of one tensor: threads, Python.
#include <pybind11/stl.h>

#include <vector>

#include "cpu/bindings.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace bmt {
namespace {

namespace py = pybind11;

using Function = void (*)(const QuantizeRow& row, int64_t first, int64_t last);

void run(Function function, int64_t values, int64_t value_size, int64_t codes, int64_t absmax, int64_t numel,
         int64_t block_offset, int threads) {
  struct Context {
    Function function;
    QuantizeRow row;
  } context{function,
            {values - block_offset * value_size, codes - block_offset, absmax, block_offset, numel + block_offset}};
  py::gil_scoped_release release;
  run_parts(
      useful_threads(numel, threads),
      [](void* pointer, int part, int parts) {
        const Context& c = *static_cast<const Context*>(pointer);
        visit_part<kQuantBlock>(&c.row, 1, c.row.numel, part, parts, [&](const QuantizeRow& row, int64_t first,
                                                                        int64_t last) { c.function(row, first, last); });
      },
      &context);
}

void quantize(int variant, int64_t values, int dtype, int64_t codes, int64_t absmax, int64_t numel, bool is_signed,
              int64_t block_offset, int threads) {
  run(kernels_at(variant).quantize.quantize[dtype][is_signed], values, item_size(static_cast<DType>(dtype)), codes,
      absmax, numel, block_offset, threads);
}

void dequantize(int variant, int64_t values, int dtype, int64_t codes, int64_t absmax, int64_t numel, bool is_signed,
                int64_t block_offset, int threads) {
  run(kernels_at(variant).quantize.dequantize[dtype][is_signed], values, item_size(static_cast<DType>(dtype)), codes,
      absmax, numel, block_offset, threads);
}

std::vector<float> map_values(bool is_signed) {
  const DynamicMap map = dynamic_map(is_signed);
  return {map.at, map.at + 256};
}

}  // namespace

void bind_quantize(py::module_& m) {
  m.def("quantize", &quantize);
  m.def("dequantize", &dequantize);
  m.def("dynamic_map", &map_values);
}

}  // namespace bmt
