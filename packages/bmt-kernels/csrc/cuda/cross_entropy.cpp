#include "cuda/cross_entropy.h"

#include "cuda/bindings.h"

namespace bmt {
namespace {

namespace py = pybind11;

CrossEntropyRows rows_of(const py::bytes& packed) { return unpack_rows<CrossEntropyRows>(packed).at(0); }

void statistics(int device, int64_t stream, const py::bytes& packed, bool smooth, int64_t out) {
  const DeviceGuard guard(device);
  check(cross_entropy_statistics_cuda(rows_of(packed), smooth, address<float>(out), address<CUstream_st>(stream)),
        "launching the statistics of cross entropy");
}

void losses(int device, int64_t stream, const py::bytes& packed, double smoothing, int64_t classes,
            int64_t total_weight, int64_t statistics, int64_t ranks, int64_t losses, int64_t normalizers) {
  const DeviceGuard guard(device);
  check(cross_entropy_losses_cuda(rows_of(packed), cross_entropy_factors(smoothing, classes, total_weight),
                                  address<const float>(statistics), ranks, address<float>(losses),
                                  address<float>(normalizers), address<CUstream_st>(stream)),
        "launching the losses of cross entropy");
}

void gradient(int device, int64_t stream, const py::bytes& packed, double smoothing, int64_t classes,
              int64_t total_weight, int64_t normalizers, int64_t scale, int64_t scale_stride, int64_t denominator,
              int64_t out, int64_t out_stride) {
  const DeviceGuard guard(device);
  check(cross_entropy_gradient_cuda(rows_of(packed), cross_entropy_factors(smoothing, classes, total_weight),
                                    address<const float>(normalizers), address<const float>(scale), scale_stride,
                                    address<const float>(denominator), address<void>(out), out_stride,
                                    address<CUstream_st>(stream)),
        "launching the gradient of cross entropy");
}

}  // namespace

void bind_cross_entropy(py::module_& m) {
  m.def("cross_entropy_statistics", &statistics);
  m.def("cross_entropy_losses", &losses);
  m.def("cross_entropy_gradient", &gradient);
}

}  // namespace bmt
