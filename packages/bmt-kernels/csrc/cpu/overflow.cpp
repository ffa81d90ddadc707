// The overflow check over a table of rows: packing, threads, Python.
#include <atomic>
#include <vector>

#include "common/arguments.h"
#include "cpu/bindings.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "cpu/tensor_view.h"

namespace bmt {
namespace {

// Bytes of DataRow[], one row per non-empty tensor, or None.
py::object pack_data(py::handle tensors, py::handle device, int device_type, int device_index) {
  if (!tensors_are_readable()) return py::none();
  const Target target{device, device_type, device_index};
  const Items items(tensors);
  if (items.size() < 0) return py::none();
  std::vector<DataRow> rows;
  rows.reserve(static_cast<size_t>(items.size()));
  for (Py_ssize_t i = 0; i < items.size(); ++i) {
    View view;
    if (!view_of(items[i], target, view, /*or_negated=*/true)) return py::none();  // signs do not matter
    if (view.numel != 0) rows.push_back({view.data, view.numel, view.dtype});
  }
  return to_bytes(rows);
}

bool any_nonfinite(const Kernels& kernels, const DataRow* rows, int64_t count, int threads) {
  struct Context {
    const Kernels& kernels;
    const DataRow* rows;
    int64_t count;
    int64_t total;
    std::atomic<bool> found;
  } context{kernels, rows, count, total_elements(rows, count), {false}};
  run_parts(
      useful_threads(context.total, threads),
      [](void* pointer, int part, int parts) {
        Context& c = *static_cast<Context*>(pointer);
        visit_part(c.rows, c.count, c.total, part, parts, [&](const DataRow& row, int64_t begin, int64_t end) {
          if (c.found.load(std::memory_order_relaxed)) return;
          const auto* data = address<const char>(row.data) + begin * item_size(static_cast<DType>(row.dtype));
          if (c.kernels.overflow.has_nonfinite[row.dtype](data, end - begin)) c.found.store(true, std::memory_order_relaxed);
        });
      },
      &context);
  return context.found.load();
}

// out = max(out, 1) if any element is infinite or NaN.
void overflow_check(int variant, const py::bytes& table, int64_t out, int threads) {
  const Kernels& kernels = kernels_at(variant);
  const auto rows = unpack_rows<DataRow>(table);
  auto* flag = address<float>(out);
  py::gil_scoped_release release;
  if (any_nonfinite(kernels, rows.data(), static_cast<int64_t>(rows.size()), threads) && *flag < 1.0f) *flag = 1.0f;
}

}  // namespace

void bind_overflow(py::module_& m) {
  m.def("pack_data", &pack_data);
  m.def("overflow_check", &overflow_check);
}

}  // namespace bmt
