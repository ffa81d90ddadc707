// The Adam step over a table of rows: packing, threads, Python.
#include <vector>

#include "common/arguments.h"
#include "cpu/bindings.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "cpu/tensor_view.h"

namespace bmt {
namespace {

// Bytes of AdamRow[], one row per non-empty tensor, or None. masters: None or a list with None entries.
// device is the torch.device of the tensors, device_type and device_index what DLPack calls it.
py::object pack_adam(py::handle params, py::handle grads, py::handle exp_avgs, py::handle exp_avg_sqs,
                     py::handle masters, py::handle device, int device_type, int device_index) {
  if (!tensors_are_readable()) return py::none();
  const Target target{device, device_type, device_index};
  const Items p(params), g(grads), m(exp_avgs), v(exp_avg_sqs);
  const bool with_masters = !masters.is_none();
  const Items w(with_masters ? masters : params);
  const Py_ssize_t count = p.size();
  if (count < 0 || g.size() != count || m.size() != count || v.size() != count || w.size() != count) return py::none();

  constexpr int64_t kFp32 = static_cast<int64_t>(DType::kFloat32);
  std::vector<AdamRow> rows;
  rows.reserve(static_cast<size_t>(count));
  std::vector<Interval> outputs, inputs;
  outputs.reserve(static_cast<size_t>(count) * (with_masters ? 4 : 3));
  inputs.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    View param, grad, exp_avg, exp_avg_sq, master;
    if (!view_of(p[i], target, param) || !view_of(g[i], target, grad) ||
        !view_of(m[i], target, exp_avg) || !view_of(v[i], target, exp_avg_sq)) {
      return py::none();
    }
    if (exp_avg.dtype != kFp32 || exp_avg_sq.dtype != kFp32) return py::none();
    if (!grad.same_shape(param) || !exp_avg.same_shape(param) || !exp_avg_sq.same_shape(param)) return py::none();
    const bool has_master = with_masters && w[i] != Py_None;
    if (has_master) {
      if (!view_of(w[i], target, master)) return py::none();
      if (master.dtype != kFp32 || param.dtype == kFp32 || !master.same_shape(param)) return py::none();
    }
    if (param.numel == 0) continue;
    const View& weight = has_master ? master : param;
    rows.push_back({weight.data, has_master ? param.data : 0, grad.data, exp_avg.data, exp_avg_sq.data, param.numel,
                    weight.dtype | (has_master ? param.dtype << 8 : 0) | grad.dtype << 16});
    outputs.push_back({param.data, param.data + param.bytes()});
    outputs.push_back({exp_avg.data, exp_avg.data + exp_avg.bytes()});
    outputs.push_back({exp_avg_sq.data, exp_avg_sq.data + exp_avg_sq.bytes()});
    if (has_master) outputs.push_back({master.data, master.data + master.bytes()});
    inputs.push_back({grad.data, grad.data + grad.bytes()});
  }
  if (overlapping(outputs, inputs)) return py::none();
  return to_bytes(rows);
}

void adam_rows(const Kernels& kernels, const AdamRow* rows, int64_t count, const AdamScalars& scalars, int threads) {
  struct Context {
    const Kernels& kernels;
    const AdamRow* rows;
    int64_t count;
    int64_t total;
    const AdamScalars& scalars;
    bool stream_copy;
  } context{kernels, rows, count, total_elements(rows, count), scalars, false};
  // The half-precision copy is the one array that is only written. Stored past the caches, its lines are not read
  // first: 28 bytes per element to move rather than 30. That is for steps whose arrays push each other out of the
  // caches; a small copy had better stay there for the next forward. The other arrays have been read, and stores past
  // the caches would make the step half as slow again.
  constexpr int64_t kBytesPerElement = 28;
  context.stream_copy = context.total * kBytesPerElement > kStreamFromBytes;
  run_parts(
      useful_threads(context.total, threads),
      [](void* pointer, int part, int parts) {
        const Context& c = *static_cast<const Context*>(pointer);
        visit_part(c.rows, c.count, c.total, part, parts, [&](const AdamRow& row, int64_t begin, int64_t end) {
          c.kernels.adam.step[weight_kind(row)][grad_kind(row)](row, begin, end, c.scalars, c.stream_copy);
        });
      },
      &context);
}

DirectionSums adam_rows_and_sums(const Kernels& kernels, const AdamRow* rows, int64_t count,
                                 const AdamScalars& scalars, int threads) {
  std::vector<DirectionSums> sums(static_cast<size_t>(total_blocks(rows, count)));
  struct Context {
    const Kernels& kernels;
    const AdamRow* rows;
    int64_t count;
    const AdamScalars& scalars;
    std::vector<DirectionSums>& sums;
  } context{kernels, rows, count, scalars, sums};
  run_parts(
      useful_threads(total_elements(rows, count), threads),
      [](void* pointer, int part, int parts) {
        const Context& c = *static_cast<const Context*>(pointer);
        const auto step = [&](const AdamRow& row, int64_t begin, int64_t end, int64_t block) {
          c.sums[static_cast<size_t>(block)] =
              c.kernels.adam.step_and_sums[weight_kind(row)][grad_kind(row)](row, begin, end, c.scalars);
        };
        visit_blocks(c.rows, c.count, static_cast<int64_t>(c.sums.size()), part, parts, step);
      },
      &context);
  DirectionSums total{0.0, 0.0};
  for (const DirectionSums& block : sums) {
    total.sum += block.sum;
    total.squares += block.squares;
  }
  return total;
}

// found_inf, grad_factor: addresses of a float each, or 0. delta_stats: the address of two doubles, or 0.
void adam_step(int variant, const py::bytes& table, const py::tuple& settings, int64_t found_inf, int64_t grad_factor,
               int64_t delta_stats, int threads) {
  if (found_inf != 0 && *address<const float>(found_inf) != 0.0f) return;
  const Kernels& kernels = kernels_at(variant);
  const auto rows = unpack_rows<AdamRow>(table);
  const auto count = static_cast<int64_t>(rows.size());
  auto scalars = adam_scalars(adam_settings(settings));
  if (grad_factor != 0) scalars.grad_factor *= *address<const float>(grad_factor);
  py::gil_scoped_release release;
  if (delta_stats == 0) {
    adam_rows(kernels, rows.data(), count, scalars, threads);
    return;
  }
  const DirectionSums sums = adam_rows_and_sums(kernels, rows.data(), count, scalars, threads);
  address<double>(delta_stats)[0] += sums.sum;
  address<double>(delta_stats)[1] += sums.squares;
}

}  // namespace

void bind_adam(py::module_& m) {
  m.def("pack_adam", &pack_adam);
  m.def("adam_step", &adam_step);
}

}  // namespace bmt
