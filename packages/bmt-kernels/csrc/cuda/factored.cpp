#include "cuda/factored.h"

#include "cuda/bindings.h"

namespace bmt {
namespace {

namespace py = pybind11;

int64_t workspace_size(const py::bytes& table) {
  const auto rows = unpack_rows<FactoredRow>(table);
  return factored_workspace(rows.data(), static_cast<int64_t>(rows.size()));
}

void sums(int device, int64_t stream, const py::bytes& table, int64_t workspace, const FactoredScalars& scalars) {
  const auto rows = unpack_rows<FactoredRow>(table);
  const DeviceGuard guard(device);
  check(factored_sums_cuda(rows.data(), static_cast<int64_t>(rows.size()), scalars, address<float>(workspace),
                           address<CUstream_st>(stream)),
        "launching the sums of squares by row and column");
}

void factored_square_sums(int device, int64_t stream, const py::bytes& table, int64_t workspace,
                          double inverse_grad_scale, int64_t grad_factor, double eps) {
  sums(device, stream, table, workspace, factored_scalars(inverse_grad_scale, grad_factor, eps, 0.0, 1.0, 0, 0, 0));
}

void factored_residual_square_sums(int device, int64_t stream, const py::bytes& table, int64_t workspace,
                                   double inverse_grad_scale, int64_t grad_factor, int64_t step_sizes, double beta1,
                                   double one_minus_beta1, double eps, int64_t found_inf) {
  sums(device, stream, table, workspace,
       factored_scalars(inverse_grad_scale, grad_factor, eps, beta1, one_minus_beta1, step_sizes, 0, found_inf));
}

void factored_update_square_sum(int device, int64_t stream, const py::bytes& table, int64_t workspace,
                                double inverse_grad_scale, int64_t grad_factor, int64_t out) {
  const auto rows = unpack_rows<FactoredRow>(table);
  const auto scalars = factored_scalars(inverse_grad_scale, grad_factor, 0.0, 0.0, 1.0, 0, 0, 0);
  const DeviceGuard guard(device);
  check(factored_update_square_sum_cuda(rows.data(), static_cast<int64_t>(rows.size()), scalars,
                                        address<float>(workspace), address<float>(out),
                                        address<CUstream_st>(stream)),
        "launching the sums of squared updates");
}

void factored_update(int device, int64_t stream, const py::bytes& table, double inverse_grad_scale,
                     int64_t grad_factor, int64_t step_sizes, int64_t decay_factors, double beta1,
                     double one_minus_beta1, int64_t found_inf) {
  const auto rows = unpack_rows<FactoredRow>(table);
  const auto scalars = factored_scalars(inverse_grad_scale, grad_factor, 0.0, beta1, one_minus_beta1, step_sizes,
                                        decay_factors, found_inf);
  const DeviceGuard guard(device);
  check(factored_update_cuda(rows.data(), static_cast<int64_t>(rows.size()), scalars, address<CUstream_st>(stream)),
        "launching the factored update");
}

}  // namespace

void bind_factored(py::module_& m) {
  m.def("factored_workspace", &workspace_size);
  m.def("factored_square_sums", &factored_square_sums);
  m.def("factored_residual_square_sums", &factored_residual_square_sums);
  m.def("factored_update_square_sum", &factored_update_square_sum);
  m.def("factored_update", &factored_update);
}

}  // namespace bmt
