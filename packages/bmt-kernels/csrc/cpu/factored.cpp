// Factored second moments over a table of rows: packing, threads, Python.
#include <vector>

#include "common/arguments.h"
#include "cpu/bindings.h"
#include "cpu/factored_passes.h"
#include "cpu/tensor_view.h"

namespace bmt {
namespace {

// A list of tensors that may be None as a whole.
class OptionalItems {
 public:
  explicit OptionalItems(py::handle sequence) : here(!sequence.is_none()), items_(sequence) {}
  bool fits(Py_ssize_t count) const { return !here || items_.size() == count; }
  PyObject* operator[](Py_ssize_t i) const { return items_[i]; }

  const bool here;

 private:
  Items items_;
};

// Whether `factor` has the shape of `matrix` without its dimension `dropped`.
bool lacks_dimension(const View& factor, const View& matrix, int32_t dropped) {
  if (factor.ndim != matrix.ndim - 1) return false;
  for (int32_t d = 0, e = 0; d < matrix.ndim; ++d) {
    if (d != dropped && factor.shape[e++] != matrix.shape[d]) return false;
  }
  return true;
}

// Bytes of FactoredRow[], one row per tensor, empty ones included, or None. All but grads may be None as a whole,
// masters in part as well. vector, if not None, is written to by the operation and overlaps nothing.
py::object pack_factored(py::handle grads, py::handle params, py::handle exp_avgs, py::handle masters,
                         py::handle row_factors, py::handle col_factors, py::handle row_sums, py::handle col_sums,
                         py::handle vector, py::handle device, int device_type, int device_index) {
  if (!tensors_are_readable()) return py::none();
  const Target target{device, device_type, device_index};
  const Items g(grads);
  const OptionalItems p(params), m(exp_avgs), w(masters), rf(row_factors), cf(col_factors), rs(row_sums), cs(col_sums);
  const Py_ssize_t count = g.size();
  if (count < 0) return py::none();
  for (const OptionalItems* items : {&p, &m, &w, &rf, &cf, &rs, &cs}) {
    if (!items->fits(count)) return py::none();
  }

  constexpr int64_t kFp32 = static_cast<int64_t>(DType::kFloat32);
  std::vector<FactoredRow> rows;
  rows.reserve(static_cast<size_t>(count));
  std::vector<Interval> outputs, inputs;
  const auto extend = [](std::vector<Interval>& intervals, const View& view) {
    if (view.numel != 0) intervals.push_back({view.data, view.data + view.bytes()});
  };
  if (!vector.is_none()) {
    View view;
    if (!view_of(vector.ptr(), target, view)) return py::none();
    extend(outputs, view);
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    View grad, param, exp_avg, master, factor;
    if (!view_of(g[i], target, grad) || grad.ndim < 2) return py::none();
    const int32_t last = grad.ndim - 1;
    FactoredRow row{};
    row.batch = 1;
    for (int32_t d = 0; d + 2 < grad.ndim; ++d) row.batch *= grad.shape[d];
    row.rows = grad.shape[last - 1];
    row.cols = grad.shape[last];
    row.index = i;
    row.grad = grad.data;
    row.kinds = grad.dtype << 16;
    extend(inputs, grad);
    const auto take_factor = [&](const OptionalItems& items, int32_t dropped, std::vector<Interval>& intervals,
                                 int64_t& data) {
      if (!items.here) return true;
      if (!view_of(items[i], target, factor) || factor.dtype != kFp32) return false;
      if (!lacks_dimension(factor, grad, dropped)) return false;
      data = factor.data;
      extend(intervals, factor);
      return true;
    };
    if (!take_factor(rf, last, inputs, row.row_factors) || !take_factor(cf, last - 1, inputs, row.col_factors) ||
        !take_factor(rs, last, outputs, row.row_sums) || !take_factor(cs, last - 1, outputs, row.col_sums)) {
      return py::none();
    }
    if (m.here) {
      if (!view_of(m[i], target, exp_avg) || exp_avg.dtype != kFp32 || !exp_avg.same_shape(grad)) return py::none();
      row.exp_avg = exp_avg.data;
      extend(outputs, exp_avg);
    }
    if (p.here) {
      if (!view_of(p[i], target, param) || !param.same_shape(grad)) return py::none();
      extend(outputs, param);
      row.weight = param.data;
      if (w.here && w[i] != Py_None) {
        if (!view_of(w[i], target, master) || master.dtype != kFp32 || !master.same_shape(grad)) return py::none();
        if (param.dtype == kFp32) return py::none();
        extend(outputs, master);
        row.weight = master.data;
        row.copy = param.data;
        row.kinds |= kFp32 | param.dtype << 8;
      } else {
        row.kinds |= param.dtype;
      }
    }
    rows.push_back(row);
  }
  if (overlapping(outputs, inputs)) return py::none();
  return to_bytes(rows);
}

void factored_square_sums(int variant, const py::bytes& table, double inverse_grad_scale, int64_t grad_factor,
                          double eps, int threads) {
  const Kernels& kernels = kernels_at(variant);
  const auto rows = unpack_rows<FactoredRow>(table);
  const auto scalars = factored_scalars(inverse_grad_scale, grad_factor, eps, 0.0, 1.0, 0, 0, 0);
  py::gil_scoped_release release;
  sum_rows_and_columns(kernels.factored.square_sums, rows, scalars, threads);
}

void factored_residual_square_sums(int variant, const py::bytes& table, double inverse_grad_scale,
                                   int64_t grad_factor, int64_t step_sizes, double beta1, double one_minus_beta1,
                                   double eps, int64_t found_inf, int threads) {
  const Kernels& kernels = kernels_at(variant);
  const auto rows = unpack_rows<FactoredRow>(table);
  const auto scalars = factored_scalars(inverse_grad_scale, grad_factor, eps, beta1, one_minus_beta1, step_sizes, 0,
                                        found_inf);
  if (skipped(scalars)) return;
  py::gil_scoped_release release;
  sum_rows_and_columns(kernels.factored.residual_sums, rows, scalars, threads);
}

void factored_update_square_sum(int variant, const py::bytes& table, double inverse_grad_scale, int64_t grad_factor,
                                int64_t out, int threads) {
  const Kernels& kernels = kernels_at(variant);
  const auto rows = unpack_rows<FactoredRow>(table);
  const auto scalars = factored_scalars(inverse_grad_scale, grad_factor, 0.0, 0.0, 1.0, 0, 0, 0);
  py::gil_scoped_release release;
  const std::vector<double> sums = sum_squared_updates(kernels.factored, rows, scalars, threads);
  for (size_t i = 0; i < rows.size(); ++i) address<float>(out)[rows[i].index] = static_cast<float>(sums[i]);
}

void factored_update(int variant, const py::bytes& table, double inverse_grad_scale, int64_t grad_factor,
                     int64_t step_sizes, int64_t decay_factors, double beta1, double one_minus_beta1,
                     int64_t found_inf, int threads) {
  const Kernels& kernels = kernels_at(variant);
  const auto rows = unpack_rows<FactoredRow>(table);
  const auto scalars = factored_scalars(inverse_grad_scale, grad_factor, 0.0, beta1, one_minus_beta1, step_sizes,
                                        decay_factors, found_inf);
  if (skipped(scalars)) return;
  py::gil_scoped_release release;
  update_weights(kernels.factored, rows, scalars, threads);
}

}  // namespace

void bind_factored(py::module_& m) {
  m.def("pack_factored", &pack_factored);
  m.def("factored_square_sums", &factored_square_sums);
  m.def("factored_residual_square_sums", &factored_residual_square_sums);
  m.def("factored_update_square_sum", &factored_update_square_sum);
  m.def("factored_update", &factored_update);
}

}  // namespace bmt
