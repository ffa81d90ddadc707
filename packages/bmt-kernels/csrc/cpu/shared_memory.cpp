// What Python does with counters in memory that several processes map.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

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

// Where things lie; bmt_kernels/shared_memory.py explains them.
constexpr int64_t kSent = 64;
constexpr int64_t kWords = 4;   // of 8 bytes in an entry: place, size, number of the message, number of the operation
constexpr int64_t kName = 96;   // bytes after these

// Write an entry of a table.
void describe(int64_t entry, int64_t place, int64_t size, uint32_t number, int64_t operation, const py::bytes& name) {
  auto* words = address<int64_t>(entry);
  // The number comes first. Who reads an old message's entry late, and the number last, sees that it was overwritten.
  reinterpret_cast<volatile int64_t&>(words[2]) = number;
  std::atomic_thread_fence(std::memory_order_release);
  words[0] = place;
  words[1] = size;
  words[3] = operation;
  std::memcpy(words + kWords, PyBytes_AS_STRING(name.ptr()), static_cast<size_t>(kName));
}

void copy(int64_t to, int64_t from, int64_t size) {
  if (size > 0) std::memcpy(address<char>(to), address<const char>(from), static_cast<size_t>(size));
}

// The counters and tables of all processes.
class Tables {
 public:
  Tables(int rank, std::vector<int64_t> memories) : rank_(static_cast<size_t>(rank)), memories_(std::move(memories)) {}

  // Whether the counters of all others have come so far.
  bool reached(int64_t counter, uint32_t number) const {
    for (size_t rank = 0; rank < memories_.size(); ++rank) {
      if (rank != rank_ && !has_reached(*address<Counter>(memories_[rank] + counter), number)) return false;
    }
    return true;
  }

  // Where the messages of all lie, and how long they are, if all have been sent within `spin` seconds and are of this
  // operation and these sizes (None: any; 0: it is not read). Else None.
  py::object receive(const py::sequence& sizes, uint32_t number, int64_t entry, int64_t operation, const py::bytes& name,
                     double spin) const {
    const char* text = PyBytes_AS_STRING(name.ptr());
    if (PyBytes_GET_SIZE(name.ptr()) != kName || sizes.size() != memories_.size()) return py::none();
    std::vector<int64_t> wanted;
    for (const auto& size : sizes) wanted.push_back(size.is_none() ? kAny : size.cast<int64_t>());
    if (!have_sent(number, wanted)) {
      if (spin <= 0) return py::none();
      py::gil_scoped_release release;
      const double end = now() + spin;
      while (!have_sent(number, wanted) && now() < end) relax();
    }
    py::list places;
    for (size_t rank = 0; rank < memories_.size(); ++rank) {
      const int64_t memory = memories_[rank];
      if (!has_reached(*address<Counter>(memory + kSent), number)) return py::none();
      const auto* words = address<const int64_t>(memory + entry);
      if (rank != rank_ && (words[2] != number || words[3] != operation ||
                            std::memcmp(words + kWords, text, static_cast<size_t>(kName)) != 0)) {
        return py::none();
      }
      if (wanted[rank] == 0) {
        places.append(py::make_tuple(0, 0));
      } else if (wanted[rank] == kAny || wanted[rank] == words[1]) {
        places.append(py::make_tuple(words[0], words[1]));
      } else {
        return py::none();
      }
    }
    return places;
  }

 private:
  static constexpr int64_t kAny = -1;

  // Whether those whose messages are to be read have sent them.
  bool have_sent(uint32_t number, const std::vector<int64_t>& wanted) const {
    for (size_t rank = 0; rank < memories_.size(); ++rank) {
      if (wanted[rank] != 0 && !has_reached(*address<Counter>(memories_[rank] + kSent), number)) return false;
    }
    return true;
  }

  size_t rank_;
  std::vector<int64_t> memories_;
};

}  // namespace

void bind_shared_memory(py::module_& m) {
  py::class_<Tables>(m, "Tables")
      .def(py::init<int, std::vector<int64_t>>())
      .def("reached", &Tables::reached)
      .def("receive", &Tables::receive);
  m.def("describe", &describe);
  m.def("copy", &copy);
  m.def("counter_set", &counter_set);
  m.def("counter_wait", &counter_wait);
}

}  // namespace bmt

#else

void bmt::bind_shared_memory(pybind11::module_&) {}

#endif
