#include "cuda/lamb.h"

#include "cuda/bindings.h"

namespace bmt {
namespace {

namespace py = pybind11;

int64_t lamb_table_blocks(const py::bytes& table) {
  const auto rows = unpack_rows<LambRow>(table);
  return lamb_blocks(rows.data(), static_cast<int64_t>(rows.size()));
}

void lamb_moments(int device, int64_t stream, const py::bytes& table, const py::tuple& settings, int64_t grad_factor,
                  int64_t sums, int64_t partials) {
  const auto rows = unpack_rows<LambRow>(table);
  const DeviceGuard guard(device);
  check(lamb_moments_cuda(rows.data(), static_cast<int64_t>(rows.size()), lamb_settings(settings),
                          address<const float>(grad_factor), address<LambSums>(sums), address<LambSums>(partials),
                          address<CUstream_st>(stream)),
        "launching LAMB's moments");
}

void lamb_update(int device, int64_t stream, const py::bytes& table, const py::tuple& settings, int64_t rates) {
  const auto rows = unpack_rows<LambRow>(table);
  const DeviceGuard guard(device);
  check(lamb_update_cuda(rows.data(), static_cast<int64_t>(rows.size()), lamb_settings(settings),
                         address<const float>(rates), address<CUstream_st>(stream)),
        "launching LAMB's update");
}

}  // namespace

void bind_lamb(py::module_& m) {
  m.def("lamb_blocks", &lamb_table_blocks);
  m.def("lamb_moments", &lamb_moments);
  m.def("lamb_update", &lamb_update);
}

}  // namespace bmt
