#include "cuda/overflow.h"

#include "cuda/bindings.h"

namespace bmt {
namespace {

namespace py = pybind11;

void overflow_check(int device, int64_t stream, const py::bytes& table, int64_t out) {
  const auto rows = unpack_rows<DataRow>(table);
  const DeviceGuard guard(device);
  check(overflow_check_cuda(rows.data(), static_cast<int64_t>(rows.size()), address<float>(out),
                            address<CUstream_st>(stream)),
        "launching the overflow check");
}

}  // namespace

void bind_overflow(py::module_& m) { m.def("overflow_check", &overflow_check); }

}  // namespace bmt
