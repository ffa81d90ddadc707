#include "cuda/adam.h"

#include "cuda/bindings.h"

namespace bmt {
namespace {

namespace py = pybind11;

void adam_step(int device, int64_t stream, const py::bytes& table, double grad_factor, double beta1,
               double one_minus_beta1, double beta2, double one_minus_beta2, double decay_factor, double l2,
               double denom_factor, double eps, double step_size, bool decoupled, bool update, int64_t found_inf) {
  const auto rows = unpack_rows<AdamRow>(table);
  const auto scalars = adam_scalars(grad_factor, beta1, one_minus_beta1, beta2, one_minus_beta2, decay_factor, l2,
                                    denom_factor, eps, step_size, decoupled, update);
  const DeviceGuard guard(device);
  check(adam_rows_cuda(rows.data(), static_cast<int64_t>(rows.size()), scalars, address<const float>(found_inf),
                       address<CUstream_st>(stream)),
        "launching the Adam step");
}

}  // namespace

void bind_adam(py::module_& m) { m.def("adam_step", &adam_step); }

}  // namespace bmt
