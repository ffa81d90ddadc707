#include "cuda/norms.h"

#include "cuda/bindings.h"

namespace bmt {
namespace {

namespace py = pybind11;

int64_t norms_table_blocks(const py::bytes& table) {
  const auto rows = unpack_rows<DataRow>(table);
  return power_sum_blocks(rows.data(), static_cast<int64_t>(rows.size()));
}

void power_sum(int device, int64_t stream, const py::bytes& table, double p, int64_t found_inf, int64_t total,
               int64_t partials) {
  const auto rows = unpack_rows<DataRow>(table);
  const DeviceGuard guard(device);
  check(power_sum_cuda(rows.data(), static_cast<int64_t>(rows.size()), p, address<float>(found_inf),
                       address<double>(total), address<double>(partials), address<CUstream_st>(stream)),
        "launching the sum of powers");
}

}  // namespace

void bind_norms(py::module_& m) {
  m.def("power_sum_blocks", &norms_table_blocks);
  m.def("power_sum", &power_sum);
}

}  // namespace bmt
