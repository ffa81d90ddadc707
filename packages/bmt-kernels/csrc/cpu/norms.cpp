// Sums of powers over a table of rows: threads, combination in order, Python.
#include <cmath>
#include <vector>

#include "common/arguments.h"
#include "cpu/bindings.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace bmt {
namespace {

namespace py = pybind11;

struct Partial {
  double total;
  bool nonfinite;
};

// total += the sum of |x|^p over all elements, or total = max(total, |x|) for an infinite p.
// found_inf = max(found_inf, 1) if any element is infinite or NaN.
void power_sum(int variant, const py::bytes& table, double p, int64_t found_inf, int64_t total, int threads) {
  const auto rows = unpack_rows<DataRow>(table);
  const auto count = static_cast<int64_t>(rows.size());
  std::vector<Partial> partials(static_cast<size_t>(total_blocks(rows.data(), count)));
  struct Context {
    const Kernels& kernels;
    const std::vector<DataRow>& rows;
    double p;
    std::vector<Partial>& partials;
  } context{kernels_at(variant), rows, p, partials};
  py::gil_scoped_release release;
  run_parts(
      useful_threads(total_elements(rows.data(), count), threads),
      [](void* pointer, int part, int parts) {
        const Context& c = *static_cast<const Context*>(pointer);
        const NormKind kind = norm_kind(c.p);
        const auto sum = [&](const DataRow& row, int64_t begin, int64_t end, int64_t block) {
          const auto* data = address<const char>(row.data) + begin * item_size(static_cast<DType>(row.dtype));
          Partial& partial = c.partials[static_cast<size_t>(block)];
          partial.total = c.kernels.norms.block[kind][row.dtype](data, end - begin, c.p);
          // Only a sum of other powers may overflow from finite elements; the block is in the cache now.
          partial.nonfinite = !std::isfinite(partial.total) &&
                              (kind != kPowers || c.kernels.overflow.has_nonfinite[row.dtype](data, end - begin));
        };
        visit_blocks(c.rows.data(), static_cast<int64_t>(c.rows.size()), static_cast<int64_t>(c.partials.size()), part,
                     parts, sum);
      },
      &context);
  double result = *address<double>(total);
  bool nonfinite = false;
  for (const Partial& partial : partials) {
    result = norm_kind(p) == kMaximum ? norm_combine<kMaximum>(result, partial.total)
                                      : norm_combine<kPowers>(result, partial.total);
    nonfinite |= partial.nonfinite;
  }
  *address<double>(total) = result;
  auto* flag = address<float>(found_inf);
  if (nonfinite && *flag < 1.0f) *flag = 1.0f;
}

// sums: the address of a double for every row, the sum of its squares.
void square_sums(int variant, const py::bytes& table, int64_t sums, int threads) {
  const auto rows = unpack_rows<DataRow>(table);
  const auto count = static_cast<int64_t>(rows.size());
  std::vector<double> partials(static_cast<size_t>(total_blocks(rows.data(), count)));
  struct Context {
    const Kernels& kernels;
    const std::vector<DataRow>& rows;
    std::vector<double>& partials;
  } context{kernels_at(variant), rows, partials};
  py::gil_scoped_release release;
  run_parts(
      useful_threads(total_elements(rows.data(), count), threads),
      [](void* pointer, int part, int parts) {
        const Context& c = *static_cast<const Context*>(pointer);
        const auto sum = [&](const DataRow& row, int64_t begin, int64_t end, int64_t block) {
          const auto* data = address<const char>(row.data) + begin * item_size(static_cast<DType>(row.dtype));
          c.partials[static_cast<size_t>(block)] = c.kernels.norms.block[kSquares][row.dtype](data, end - begin, 2.0);
        };
        visit_blocks(c.rows.data(), static_cast<int64_t>(c.rows.size()), static_cast<int64_t>(c.partials.size()), part,
                     parts, sum);
      },
      &context);
  const double* partial = partials.data();
  auto* out = address<double>(sums);
  for (const DataRow& row : rows) {
    double total = 0.0;
    for (const double* end = partial + blocks_of(row.numel); partial != end; ++partial) total += *partial;
    *out++ = total;
  }
}

}  // namespace

void bind_norms(py::module_& m) {
  m.def("power_sum", &power_sum);
  m.def("square_sums", &square_sums);
}

}  // namespace bmt
