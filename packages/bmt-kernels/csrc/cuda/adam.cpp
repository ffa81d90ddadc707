#include "cuda/adam.h"

#include "cuda/bindings.h"

namespace bmt {
namespace {

namespace py = pybind11;

int64_t adam_table_blocks(const py::bytes& table) {
  const auto rows = unpack_rows<AdamRow>(table);
  return adam_blocks(rows.data(), static_cast<int64_t>(rows.size()));
}

DeviceNumber device_number(const py::tuple& address_and_type) {
  return {address<const void>(address_and_type[0].cast<int64_t>()),
          static_cast<NumberType>(address_and_type[1].cast<int>())};
}

void adam_step(int device, int64_t stream, const py::bytes& table, const py::tuple& settings, const py::tuple& lr,
               const py::tuple& step, int64_t scalars, int64_t found_inf, int64_t grad_factor, int64_t delta_stats,
               int64_t partials) {
  const auto rows = unpack_rows<AdamRow>(table);
  const AdamExtras extras{address<const float>(found_inf), address<const float>(grad_factor), device_number(lr),
                          device_number(step),             address<AdamScalars>(scalars),     address<double>(delta_stats),
                          address<double>(partials)};
  const DeviceGuard guard(device);
  check(adam_rows_cuda(rows.data(), static_cast<int64_t>(rows.size()), adam_settings(settings), extras,
                       address<CUstream_st>(stream)),
        "launching the Adam step");
}

}  // namespace

void bind_adam(py::module_& m) {
  m.attr("ADAM_SCALARS_BYTES") = sizeof(AdamScalars);
  m.def("adam_blocks", &adam_table_blocks);
  m.def("adam_step", &adam_step);
}

}  // namespace bmt
