// The Python module _cpu.
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "common/arguments.h"
#include "cpu/pack.h"
#include "cpu/parallel.h"
#include "cpu/run.h"

namespace py = pybind11;

namespace {

using namespace bmt;

std::vector<const Kernels*> built_variants() {
  std::vector<const Kernels*> variants{&kPortableKernels};
#if defined(BMT_X86)
  variants.push_back(&kAvx2Kernels);
  variants.push_back(&kAvx512Kernels);
#endif
  return variants;
}

bool processor_runs(const std::string& name) {
  if (name == "portable") return true;
#if defined(BMT_X86)
  __builtin_cpu_init();
  // Every processor with AVX2 has F16C, which not every compiler lets one ask for.
  if (name == "avx2") return __builtin_cpu_supports("avx2");
  if (name == "avx512") {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  }
#endif
  return false;
}

py::tuple variants(bool runnable_only) {
  py::list names;
  for (const Kernels* kernels : built_variants()) {
    if (!runnable_only || processor_runs(kernels->name)) names.append(kernels->name);
  }
  return py::tuple(names);
}

const Kernels& kernels_at(int index) {
  static const std::vector<const Kernels*> built = built_variants();
  if (index < 0 || index >= static_cast<int>(built.size())) throw py::value_error("no such CPU variant");
  return *built[static_cast<size_t>(index)];
}

float flag_at(int64_t address) { return *reinterpret_cast<const float*>(static_cast<uintptr_t>(address)); }

void adam_step(int variant, const py::bytes& table, double grad_factor, double beta1, double one_minus_beta1,
               double beta2, double one_minus_beta2, double decay_factor, double l2, double denom_factor, double eps,
               double step_size, bool decoupled, bool update, int64_t found_inf, int threads) {
  if (found_inf != 0 && flag_at(found_inf) != 0.0f) return;
  const Kernels& kernels = kernels_at(variant);
  const auto rows = unpack_rows<AdamRow>(table);
  const auto scalars = adam_scalars(grad_factor, beta1, one_minus_beta1, beta2, one_minus_beta2, decay_factor, l2,
                                    denom_factor, eps, step_size, decoupled, update);
  py::gil_scoped_release release;
  adam_rows(kernels, rows.data(), static_cast<int64_t>(rows.size()), scalars, threads);
}

// out = max(out, 1) if any element is infinite or NaN.
void overflow_check(int variant, const py::bytes& table, int64_t out, int threads) {
  const Kernels& kernels = kernels_at(variant);
  const auto rows = unpack_rows<DataRow>(table);
  auto* flag = reinterpret_cast<float*>(static_cast<uintptr_t>(out));
  py::gil_scoped_release release;
  if (any_nonfinite(kernels, rows.data(), static_cast<int64_t>(rows.size()), threads) && *flag < 1.0f) *flag = 1.0f;
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "CPU kernels on raw addresses; use the functions of bmt_kernels, which check their arguments.";
  m.def("variants", &variants, py::arg("runnable_only"));
  m.def("threading_name", &threading_name);
  m.def("set_tensor_type", &set_tensor_type);
  m.def("pack_adam", &pack_adam);
  m.def("pack_data", &pack_data);
  m.def("adam_step", &adam_step);
  m.def("overflow_check", &overflow_check);
}
