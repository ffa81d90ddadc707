// What Python does with counters in memory that several processes map.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "cpu/bindings.h"
#include "cpu/counter.h"

#if defined(__linux__)

#include "common/table.h"

namespace bmt {
namespace {

namespace py = pybind11;

// What was written before is visible to those who find the counter here.
void counter_set(int64_t where, uint32_t value) {
  auto& counter = *address<Counter>(where);
  counter.value.store(value, std::memory_order_seq_cst);
  wake(counter);
}

bool counter_wait(int64_t where, uint32_t value, double spin, double sleep) {
  auto& counter = *address<Counter>(where);
  if (has_reached(counter, value)) return true;
  if (spin <= 0 && sleep <= 0) return false;
  py::gil_scoped_release release;
  return wait_for(counter, value, spin, sleep);
}

}  // namespace

void bind_shared_memory(py::module_& m) {
  m.def("counter_set", &counter_set);
  m.def("counter_wait", &counter_wait);
}

}  // namespace bmt

#else

void bmt::bind_shared_memory(pybind11::module_&) {}

#endif
