// The two passes of a LAMB step over a table of rows: packing, threads, combination in order, Python.
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
// entries) are.
py::object pack_lamb(py::handle params, py::handle grads, py::handle exp_avgs, py::handle exp_avg_sqs,
                     py::handle masters, py::handle device, int device_type, int device_index) {
  if (!tensors_are_readable()) return py::none();
  const Target target{device, device_type, device_index};
  const bool first_pass = !grads.is_none();
  const bool with_masters = !masters.is_none();
  const Items p(params), m(exp_avgs), v(exp_avg_sqs);
  const Items g(first_pass ? grads : params), w(with_masters ? masters : params);
  const Py_ssize_t count = p.size();
  if (count < 0 || m.size() != count || v.size() != count || g.size() != count || w.size() != count) return py::none();

  constexpr int64_t kFp32 = static_cast<int64_t>(DType::kFloat32);
  std::vector<LambRow> rows;
  rows.reserve(static_cast<size_t>(count));
  std::vector<Interval> weights, moments, read;
  const auto extend = [](std::vector<Interval>& intervals, const View& view) {
    intervals.push_back({view.data, view.data + view.bytes()});
  };
  for (Py_ssize_t i = 0; i < count; ++i) {
    View param, grad{}, exp_avg, exp_avg_sq, master;
    if (!view_of(p[i], target, param) || !view_of(m[i], target, exp_avg) || !view_of(v[i], target, exp_avg_sq)) {
      return py::none();
    }
    if (exp_avg.dtype != kFp32 || exp_avg_sq.dtype != kFp32) return py::none();
    if (!exp_avg.same_shape(param) || !exp_avg_sq.same_shape(param)) return py::none();
    if (first_pass && (!view_of(g[i], target, grad) || !grad.same_shape(param))) return py::none();
    const bool has_master = with_masters && w[i] != Py_None;
    if (has_master) {
      if (!view_of(w[i], target, master)) return py::none();
      if (master.dtype != kFp32 || param.dtype == kFp32 || !master.same_shape(param)) return py::none();
    }
    if (param.numel == 0) continue;
    const View& weight = has_master ? master : param;
    rows.push_back({weight.data, has_master ? param.data : 0, grad.data, exp_avg.data, exp_avg_sq.data, param.numel, i,
                    weight.dtype | (has_master ? param.dtype << 8 : 0) | grad.dtype << 16});
    extend(moments, exp_avg);
    extend(moments, exp_avg_sq);
    extend(weights, param);
    if (has_master) extend(weights, master);
    if (first_pass) extend(read, grad);
  }
  std::vector<Interval>& others = first_pass ? weights : moments;
  read.insert(read.end(), others.begin(), others.end());
  if (overlapping(first_pass ? moments : weights, read)) return py::none();
  return to_bytes(rows);
}

// grad_factor: the address of a float, or 0. sums: the address of two doubles for every tensor, of which those of
// the rows are written.
void lamb_moments(int variant, const py::bytes& table, const py::tuple& settings, int64_t grad_factor, int64_t sums,
                  int threads) {
  const auto rows = unpack_rows<LambRow>(table);
  const auto count = static_cast<int64_t>(rows.size());
  std::vector<LambSums> partials(static_cast<size_t>(total_blocks(rows.data(), count)));
  struct Context {
    const Kernels& kernels;
    const std::vector<LambRow>& rows;
    LambScalars scalars;
    std::vector<LambSums>& partials;
  } context{kernels_at(variant), rows, lamb_scalars(lamb_settings(settings)), partials};
  if (grad_factor != 0) context.scalars.grad_factor *= *address<const float>(grad_factor);
  py::gil_scoped_release release;
  run_parts(
      useful_threads(total_elements(rows.data(), count), threads),
      [](void* pointer, int part, int parts) {
        const Context& c = *static_cast<const Context*>(pointer);
        const auto move = [&](const LambRow& row, int64_t begin, int64_t end, int64_t block) {
          c.partials[static_cast<size_t>(block)] =
              c.kernels.lamb.moments[weight_dtype(row)][grad_kind(row)](row, begin, end, c.scalars);
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
  const auto rows = unpack_rows<LambRow>(table);
  const auto count = static_cast<int64_t>(rows.size());
  struct Context {
    const Kernels& kernels;
    const std::vector<LambRow>& rows;
    int64_t total;
    LambScalars scalars;
    const float* rates;
    bool stream_copy;
  } context{kernels_at(variant), rows, total_elements(rows.data(), count), lamb_scalars(lamb_settings(settings)),
            address<const float>(rates), false};
  constexpr int64_t kBytesPerElement = 16;
  context.stream_copy = context.total * kBytesPerElement > kStreamFromBytes;
  py::gil_scoped_release release;
  run_parts(
      useful_threads(context.total, threads),
      [](void* pointer, int part, int parts) {
        const Context& c = *static_cast<const Context*>(pointer);
        const auto update = [&](const LambRow& row, int64_t begin, int64_t end) {
          c.kernels.lamb.update[weight_kind(row)](row, begin, end, c.scalars, c.rates[row.index],
                                                  c.stream_copy && row.copy != 0);
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
