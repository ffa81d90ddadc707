// LAMB steps over a table of rows, in two passes: packing, threads, combination in order, Python.
#include <algorithm>
#include <vector>

#include "common/arguments.h"
#include "cpu/bindings.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "cpu/tensor_view.h"

namespace bmt {
namespace {

// Bytes of LambRow[], one row per non-empty tensor, or None. For the first pass grads is a list and masters None, and
// the moments are written to; for the second, grads is None, and params and masters (None, or a list with None
// entries) are. directions may be None; the first pass writes to them.
py::object pack_lamb(py::handle params, py::handle grads, py::handle exp_avgs, py::handle exp_avg_sqs,
                     py::handle masters, py::handle directions, py::handle device, int device_type, int device_index) {
  if (!tensors_are_readable()) return py::none();
  const Target target{device, device_type, device_index};
  const bool with_grads = !grads.is_none();
  const bool with_masters = !masters.is_none();
  const Items p(params), m(exp_avgs), v(exp_avg_sqs);
  const bool with_directions = !directions.is_none();
  const Items g(with_grads ? grads : params), w(with_masters ? masters : params);
  const Items d(with_directions ? directions : params);
  const Py_ssize_t count = p.size();
  if (count < 0 || m.size() != count || v.size() != count || g.size() != count || w.size() != count ||
      d.size() != count) {
    return py::none();
  }

  constexpr int64_t kFp32 = static_cast<int64_t>(DType::kFloat32);
  std::vector<LambRow> rows;
  rows.reserve(static_cast<size_t>(count));
  std::vector<Interval> weights, moments, read;
  const auto extend = [](std::vector<Interval>& intervals, const View& view) {
    intervals.push_back({view.data, view.data + view.bytes()});
  };
  for (Py_ssize_t i = 0; i < count; ++i) {
    View param, grad{}, exp_avg, exp_avg_sq, master, direction{};
    if (!view_of(p[i], target, param) || !view_of(m[i], target, exp_avg) || !view_of(v[i], target, exp_avg_sq)) {
      return py::none();
    }
    if (exp_avg.dtype != kFp32 || exp_avg_sq.dtype != kFp32) return py::none();
    if (!exp_avg.same_shape(param) || !exp_avg_sq.same_shape(param)) return py::none();
    if (with_grads && (!view_of(g[i], target, grad) || !grad.same_shape(param))) return py::none();
    const bool has_master = with_masters && w[i] != Py_None;
    if (has_master) {
      if (!view_of(w[i], target, master)) return py::none();
      if (master.dtype != kFp32 || param.dtype == kFp32 || !master.same_shape(param)) return py::none();
    }
    if (with_directions) {
      if (!view_of(d[i], target, direction)) return py::none();
      if (direction.dtype != kFp32 || !direction.same_shape(param)) return py::none();
    }
    if (param.numel == 0) continue;
    const View& weight = has_master ? master : param;
    rows.push_back({weight.data, has_master ? param.data : 0, grad.data, exp_avg.data, exp_avg_sq.data, param.numel, i,
                    weight.dtype | (has_master ? param.dtype << 8 : 0) | grad.dtype << 16, direction.data});
    extend(moments, exp_avg);
    extend(moments, exp_avg_sq);
    extend(weights, param);
    if (has_master) extend(weights, master);
    if (with_grads) extend(read, grad);
    if (with_directions) extend(with_grads ? moments : read, direction);
  }
  std::vector<Interval>& written = with_grads ? moments : weights;
  const std::vector<Interval>& others = with_grads ? weights : moments;
  read.insert(read.end(), others.begin(), others.end());
  if (overlapping(written, read)) return py::none();
  return to_bytes(rows);
}

LambScalars scalars_of(const py::tuple& settings, int64_t grad_factor) {
  LambScalars scalars = lamb_scalars(lamb_settings(settings));
  if (grad_factor != 0) scalars.grad_factor *= *address<const float>(grad_factor);
  return scalars;
}

// grad_factor: the address of a float, or 0. sums: the address of two doubles for every tensor, of which those of
// the rows are written.
void lamb_moments(int variant, const py::bytes& table, const py::tuple& settings, int64_t grad_factor, int64_t sums,
                  int threads) {
  const Kernels& kernels = kernels_at(variant);
  const auto rows = unpack_rows<LambRow>(table);
  const auto count = static_cast<int64_t>(rows.size());
  const LambScalars scalars = scalars_of(settings, grad_factor);
  py::gil_scoped_release release;
  std::vector<LambSums> partials(static_cast<size_t>(total_blocks(rows.data(), count)));
  struct Context {
    const Kernels& kernels;
    const std::vector<LambRow>& rows;
    const LambScalars& scalars;
    std::vector<LambSums>& partials;
  } context{kernels, rows, scalars, partials};
  run_parts(
      useful_threads(total_elements(rows.data(), count), threads),
      [](void* pointer, int part, int parts) {
        const Context& c = *static_cast<const Context*>(pointer);
        const auto move = [&](const LambRow& row, int64_t begin, int64_t end, int64_t block) {
          c.partials[static_cast<size_t>(block)] =
              c.kernels.lamb.moments[row.direction != 0][weight_dtype(row)][grad_kind(row)](row, begin, end, c.scalars);
        };
        visit_blocks(c.rows.data(), static_cast<int64_t>(c.rows.size()), static_cast<int64_t>(c.partials.size()), part,
                     parts, move);
      },
      &context);
  const LambSums* partial = partials.data();
  for (const LambRow& row : rows) {
    LambSums total{0.0, 0.0};
    for (const LambSums* end = partial + blocks_of(row.numel); partial != end; ++partial) {
      total.weights += partial->weights;
      total.directions += partial->directions;
    }
    address<LambSums>(sums)[row.index] = total;
  }
}

// rates: the address of a float for every tensor.
void lamb_update(int variant, const py::bytes& table, const py::tuple& settings, int64_t rates, int threads) {
  constexpr int64_t kBytesPerElement = 16;
  const Kernels& kernels = kernels_at(variant);
  const auto rows = unpack_rows<LambRow>(table);
  const LambScalars scalars = scalars_of(settings, 0);
  py::gil_scoped_release release;
  struct Context {
    const Kernels& kernels;
    const std::vector<LambRow>& rows;
    int64_t total;
    const LambScalars& scalars;
    const float* rates;
  } context{kernels, rows, total_elements(rows.data(), static_cast<int64_t>(rows.size())), scalars,
            address<const float>(rates)};
  run_parts(
      useful_threads(context.total, threads),
      [](void* pointer, int part, int parts) {
        const Context& c = *static_cast<const Context*>(pointer);
        // Copies of so many elements are better stored past the caches.
        const bool stream = c.total * kBytesPerElement > kStreamFromBytes;
        const auto update = [&](const LambRow& row, int64_t begin, int64_t end) {
          // From the end, which the first pass has touched last and the caches still have.
          for (int64_t last = end; last > begin;) {
            const int64_t first = std::max(begin, (last - 1) / kBlock * kBlock);
            c.kernels.lamb.update[row.direction != 0][weight_kind(row)](row, first, last, c.scalars,
                                                                        c.rates[row.index], stream && row.copy != 0);
            last = first;
          }
        };
        visit_part(c.rows.data(), static_cast<int64_t>(c.rows.size()), c.total, part, parts, update);
      },
      &context);
}

}  // namespace

void bind_lamb(py::module_& m) {
  m.def("pack_lamb", &pack_lamb);
  m.def("lamb_moments", &lamb_moments);
  m.def("lamb_update", &lamb_update);
}

}  // namespace bmt
