#include "cuda/factored_averages.h"

#include "cuda/bindings.h"

namespace bmt {
namespace {

namespace py = pybind11;

void factored_totals(int device, int64_t stream, const py::bytes& table) {
  const auto rows = unpack_rows<AverageRow>(table);
  const DeviceGuard guard(device);
  check(factored_totals_cuda(rows.data(), static_cast<int64_t>(rows.size()), address<CUstream_st>(stream)),
        "launching the totals of factored averages");
}

void factored_averages(int device, int64_t stream, const py::bytes& table, double decay) {
  const auto rows = unpack_rows<AverageRow>(table);
  const DeviceGuard guard(device);
  check(factored_averages_cuda(rows.data(), static_cast<int64_t>(rows.size()), decay, address<CUstream_st>(stream)),
        "launching the factored averages");
}

}  // namespace

void bind_factored_averages(py::module_& m) {
  m.def("factored_totals", &factored_totals);
  m.def("factored_averages", &factored_averages);
}

}  // namespace bmt
