// The Python module _cpu.
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "build_settings.h"
#include "cpu/bindings.h"
#include "cpu/parallel.h"
#include "cpu/tensor_view.h"

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

}  // namespace

const bmt::Kernels& bmt::kernels_at(int index) {
  static const std::vector<const Kernels*> built = built_variants();
  if (index < 0 || index >= static_cast<int>(built.size())) throw py::value_error("no such CPU variant");
  return *built[static_cast<size_t>(index)];
}
PYBIND11_MODULE(_cpu, m) {
  m.doc() = "CPU kernels on raw addresses; use the functions of bmt_kernels, which check their arguments.";
  m.attr("COMPILER") = kCompiler;
  m.attr("CUDA_NOTE") = kCudaNote;
  m.def("variants", &variants, py::arg("runnable_only"));
  m.def("threading_name", &threading_name);
  m.def("set_tensor_type", &set_tensor_type);
  bind_adam(m);
  bind_adam8bit(m);
  bind_cross_entropy(m);
  bind_factored(m);
  bind_factored_averages(m);
  bind_lamb(m);
  bind_messages(m);
  bind_norms(m);
  bind_overflow(m);
  bind_packing(m);
  bind_quantize(m);
  bind_rounding(m);
  bind_shared_memory(m);
}
