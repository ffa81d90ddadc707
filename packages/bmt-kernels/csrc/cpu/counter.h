// Counters in memory that several processes map: a process moves a counter, others wait until it has come so far.
#pragma once

#if defined(__linux__)

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace bmt {

struct Counter {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(Counter) == 8, "processes share counters");

// Counters wrap around; those that are compared are never half their range apart.
inline bool has_reached(const Counter& counter, uint32_t value) {
  return static_cast<int32_t>(counter.value.load(std::memory_order_acquire) - value) >= 0;
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline double now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

inline long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

// Wake those that sleep on a counter, which was moved with std::memory_order_seq_cst.
inline void wake(Counter& counter) {
  // In one order with the sleepers' own steps below: either they see the value, or this sees them.
  if (counter.sleepers.load(std::memory_order_seq_cst) != 0) futex(counter.value, FUTEX_WAKE, INT_MAX, nullptr);
}

// Look at the counter for `spin` seconds and then sleep for up to `sleep` seconds; whether it has come so far. May
// return early.
inline bool wait_for(Counter& counter, uint32_t value, double spin, double sleep) {
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

}  // namespace bmt

#endif
