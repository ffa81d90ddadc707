#include "cuda/rounding.h"

#include "cuda/bindings.h"

namespace bmt {
namespace {

namespace py = pybind11;

void round_stochastically(int device, int64_t stream, const py::bytes& packed, bool to_half) {
  const DeviceGuard guard(device);
  check(round_stochastically_cuda(unpack_rows<RoundingRow>(packed).at(0), to_half, address<CUstream_st>(stream)),
        "launching the stochastic rounding");
}

}  // namespace

void bind_rounding(py::module_& m) { m.def("round_stochastically", &round_stochastically); }

}  // namespace bmt
