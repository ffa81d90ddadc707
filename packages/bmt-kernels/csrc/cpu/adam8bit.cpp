// The Adam step with 8-bit moments over a table of rows: packing, threads, Python.
#include <vector>

#include "common/arguments.h"
#include "cpu/bindings.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "cpu/tensor_view.h"

namespace bmt {
namespace {

Interval interval(const View& view) { return {view.data, view.data + view.bytes()}; }

// Bytes of Adam8bitRow[], one row per non-empty tensor, or None. masters and block_offsets: None or lists, masters
// with None entries. The rest as for pack_adam.
py::object pack_adam8bit(py::handle params, py::handle grads, py::handle exp_avgs, py::handle exp_avg_sqs,
                         py::handle absmax_avgs, py::handle absmax_avg_sqs, py::handle masters,
                         py::handle block_offsets, py::handle device, int device_type, int device_index) {
  if (!tensors_are_readable()) return py::none();
  const Target target{device, device_type, device_index};
  const Items p(params), g(grads), m(exp_avgs), v(exp_avg_sqs), a(absmax_avgs), b(absmax_avg_sqs);
  const bool with_masters = !masters.is_none();
  const bool with_offsets = !block_offsets.is_none();
  const Items w(with_masters ? masters : params), o(with_offsets ? block_offsets : params);
  const Py_ssize_t count = p.size();
  if (count < 0) return py::none();
  for (const Items* items : {&g, &m, &v, &a, &b, &w, &o}) {
    if (items->size() != count) return py::none();
  }

  constexpr int64_t kFp32 = static_cast<int64_t>(DType::kFloat32);
  std::vector<Adam8bitRow> rows;
  rows.reserve(static_cast<size_t>(count));
  std::vector<Interval> outputs, inputs;
  outputs.reserve(static_cast<size_t>(count) * 6);
  inputs.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    View param, grad, exp_avg, exp_avg_sq, absmax_avg, absmax_avg_sq, master;
    if (!view_of(p[i], target, param) || !view_of(g[i], target, grad) || !byte_view_of(m[i], target, exp_avg) ||
        !byte_view_of(v[i], target, exp_avg_sq) || !view_of(a[i], target, absmax_avg) ||
        !view_of(b[i], target, absmax_avg_sq)) {
      return py::none();
    }
    if (!grad.same_shape(param) || !exp_avg.same_shape(param) || !exp_avg_sq.same_shape(param)) return py::none();
    int64_t offset = 0;
    if (with_offsets) {
      if (!PyLong_CheckExact(o[i])) return py::none();
      offset = PyLong_AsLongLong(o[i]);
      if (offset < 0 || offset >= kQuantBlock) {
        PyErr_Clear();
        return py::none();
      }
    }
    const int64_t blocks = param.numel == 0 ? 0 : (param.numel + offset + kQuantBlock - 1) / kQuantBlock;
    for (const View* absmax : {&absmax_avg, &absmax_avg_sq}) {
      if (absmax->dtype != kFp32 || absmax->ndim != 1 || absmax->numel != blocks) return py::none();
    }
    const bool has_master = with_masters && w[i] != Py_None;
    if (has_master) {
      if (!view_of(w[i], target, master)) return py::none();
      if (master.dtype != kFp32 || param.dtype == kFp32 || !master.same_shape(param)) return py::none();
    }
    if (param.numel == 0) continue;
    const View& weight = has_master ? master : param;
    rows.push_back({weight.data, has_master ? param.data : 0, grad.data, exp_avg.data, exp_avg_sq.data,
                    absmax_avg.data, absmax_avg_sq.data, offset, param.numel,
                    weight.dtype | (has_master ? param.dtype << 8 : 0) | grad.dtype << 16});
    for (const View* output : {&param, &exp_avg, &exp_avg_sq, &absmax_avg, &absmax_avg_sq}) {
      outputs.push_back(interval(*output));
    }
    if (has_master) outputs.push_back(interval(master));
    inputs.push_back(interval(grad));
  }
  if (overlapping(outputs, inputs)) return py::none();
  return to_bytes(rows);
}

void adam8bit_rows(const Kernels& kernels, const Adam8bitRow* rows, int64_t count, const AdamScalars& scalars,
                   int threads) {
  struct Context {
    const Kernels& kernels;
    const Adam8bitRow* rows;
    int64_t count;
    int64_t total;
    const AdamScalars& scalars;
  } context{kernels, rows, count, total_elements(rows, count), scalars};
  run_parts(
      useful_threads(context.total, threads),
      [](void* pointer, int part, int parts) {
        const Context& c = *static_cast<const Context*>(pointer);
        visit_part<kQuantBlock>(c.rows, c.count, c.total, part, parts,
                                [&](const Adam8bitRow& row, int64_t first, int64_t last) {
                                  c.kernels.adam8bit.step[weight_kind(row)][grad_kind(row)](row, first, last, c.scalars);
                                });
      },
      &context);
}

void adam8bit_step(int variant, const py::bytes& table, const py::tuple& settings, int64_t found_inf, int threads) {
  if (found_inf != 0 && *address<const float>(found_inf) != 0.0f) return;
  const Kernels& kernels = kernels_at(variant);
  auto rows = unpack_rows<Adam8bitRow>(table);
  for (Adam8bitRow& row : rows) count_from_block(row);
  const auto scalars = adam_scalars(adam_settings(settings));
  py::gil_scoped_release release;
  adam8bit_rows(kernels, rows.data(), static_cast<int64_t>(rows.size()), scalars, threads);
}

}  // namespace

void bind_adam8bit(py::module_& m) {
  m.def("pack_adam8bit", &pack_adam8bit);
  m.def("adam8bit_step", &adam8bit_step);
}

}  // namespace bmt
