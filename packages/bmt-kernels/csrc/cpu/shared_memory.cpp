// Counters in memory that several processes map: one process moves a counter, others wait until it has come so far.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "cpu/bindings.h"

#if defined(__linux__)

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>

#include "common/table.h"

namespace bmt {
namespace {

namespace py = pybind11;

struct Counter {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(Counter) == 8, "processes share counters");

// Counters wrap around; those that are compared are never half their range apart.
bool has_reached(const Counter& counter, uint32_t value) {
  return static_cast<int32_t>(counter.value.load(std::memory_order_acquire) - value) >= 0;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

double now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

// What was written before is visible to those who find the counter here.
void counter_set(int64_t where, uint32_t value) {
  auto& counter = *address<Counter>(where);
  // In one order with the sleepers' own steps below: either they see the value, or this sees them.
  counter.value.store(value, std::memory_order_seq_cst);
  if (counter.sleepers.load(std::memory_order_seq_cst) != 0) futex(counter.value, FUTEX_WAKE, INT_MAX, nullptr);
}

// Looks at the counter for `spin` seconds and then sleeps for up to `sleep` seconds; whether it has come so far. May
// return early.
bool counter_wait(int64_t where, uint32_t value, double spin, double sleep) {
  auto& counter = *address<Counter>(where);
  if (has_reached(counter, value)) return true;
  if (spin <= 0 && sleep <= 0) return false;
  py::gil_scoped_release release;
  if (spin > 0) {
    const double end = now() + spin;
    do {
      for (int i = 0; i < 32; ++i) {
        if (has_reached(counter, value)) return true;
        relax();
      }
    } while (now() < end);
  }
  if (sleep > 0) {
    timespec timeout{};
    timeout.tv_sec = static_cast<time_t>(sleep);
    timeout.tv_nsec = static_cast<long>((sleep - static_cast<double>(timeout.tv_sec)) * 1e9);
    counter.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = counter.value.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(seen - value) < 0) futex(counter.value, FUTEX_WAIT, seen, &timeout);
    counter.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
  return has_reached(counter, value);
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
