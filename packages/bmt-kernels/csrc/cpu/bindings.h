// What the operations add to the Python module _cpu.
#pragma once

#include <pybind11/pybind11.h>

#include "cpu/kernels.h"

namespace bmt {

// The kernels of the variant that Python names by its place among those built; throws ValueError.
const Kernels& kernels_at(int variant);

void bind_adam(pybind11::module_& m);
void bind_adam8bit(pybind11::module_& m);
void bind_cross_entropy(pybind11::module_& m);
void bind_factored(pybind11::module_& m);
void bind_factored_averages(pybind11::module_& m);
void bind_lamb(pybind11::module_& m);
void bind_messages(pybind11::module_& m);  // on Linux only
void bind_norms(pybind11::module_& m);
void bind_overflow(pybind11::module_& m);
void bind_packing(pybind11::module_& m);
void bind_quantize(pybind11::module_& m);
void bind_rounding(pybind11::module_& m);
void bind_shared_memory(pybind11::module_& m);  // counter_set, counter_wait: on Linux only

}  // namespace bmt
