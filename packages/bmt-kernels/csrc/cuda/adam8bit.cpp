#include "cuda/adam8bit.h"

#include "cuda/bindings.h"

namespace bmt {
namespace {

namespace py = pybind11;

void adam8bit_step(int device, int64_t stream, const py::bytes& table, const py::tuple& settings, int64_t found_inf) {
  auto rows = unpack_rows<Adam8bitRow>(table);
  for (Adam8bitRow& row : rows) count_from_block(row);
  const auto scalars = adam_scalars(adam_settings(settings));
  const DeviceGuard guard(device);
  check(adam8bit_rows_cuda(rows.data(), static_cast<int64_t>(rows.size()), scalars, address<const float>(found_inf),
                           address<CUstream_st>(stream)),
        "launching the 8-bit Adam step");
}

}  // namespace

void bind_adam8bit(py::module_& m) { m.def("adam8bit_step", &adam8bit_step); }

}  // namespace bmt
