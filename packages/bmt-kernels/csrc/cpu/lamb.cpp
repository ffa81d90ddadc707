// LAMB steps over a table of rows, in two passes or whole: packing, threads, combination in order, Python.
#include <cmath>
#include <mutex>
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
// entries) are. For a whole step grads is a list, too, and all but these are written to.
py::object pack_lamb(py::handle params, py::handle grads, py::handle exp_avgs, py::handle exp_avg_sqs,
                     py::handle masters, bool whole_step, py::handle device, int device_type, int device_index) {
  if (!tensors_are_readable()) return py::none();
  const Target target{device, device_type, device_index};
  const bool with_grads = !grads.is_none();
  const bool with_masters = !masters.is_none();
  const Items p(params), m(exp_avgs), v(exp_avg_sqs);
  const Items g(with_grads ? grads : params), w(with_masters ? masters : params);
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
    if (with_grads && (!view_of(g[i], target, grad) || !grad.same_shape(param))) return py::none();
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
    if (with_grads) extend(read, grad);
  }
  std::vector<Interval>& written = with_grads ? moments : weights;
  const std::vector<Interval>& others = with_grads ? weights : moments;
  std::vector<Interval>& rest = whole_step ? written : read;
  rest.insert(rest.end(), others.begin(), others.end());
  if (overlapping(written, read)) return py::none();
  return to_bytes(rows);
}

LambScalars scalars_of(const py::tuple& settings, int64_t grad_factor) {
  LambScalars scalars = lamb_scalars(lamb_settings(settings));
  if (grad_factor != 0) scalars.grad_factor *= *address<const float>(grad_factor);
  return scalars;
}

// The first pass over `count` rows; visit_total(row, sums) is called for each.
template <class VisitTotal>
void move_moments_of(const Kernels& kernels, const LambRow* rows, int64_t count, const LambScalars& scalars,
                     float* directions, std::vector<LambSums>& partials, int threads, const VisitTotal& visit_total) {
  partials.resize(static_cast<size_t>(total_blocks(rows, count)));
  struct Context {
    const Kernels& kernels;
    const LambRow* rows;
    int64_t count;
    const LambScalars& scalars;
    float* directions;
    std::vector<LambSums>& partials;
  } context{kernels, rows, count, scalars, directions, partials};
  run_parts(
      useful_threads(total_elements(rows, count), threads),
      [](void* pointer, int part, int parts) {
        const Context& c = *static_cast<const Context*>(pointer);
        const auto& moments = c.kernels.lamb.moments[c.directions != nullptr];
        const auto move = [&](const LambRow& row, int64_t begin, int64_t end, int64_t block) {
          c.partials[static_cast<size_t>(block)] =
              moments[weight_dtype(row)][grad_kind(row)](row, begin, end, c.scalars, c.directions);
        };
        visit_blocks(c.rows, c.count, static_cast<int64_t>(c.partials.size()), part, parts, move);
      },
      &context);
  const LambSums* partial = partials.data();
  for (int64_t i = 0; i < count; ++i) {
    LambSums total{0.0, 0.0};
    for (const LambSums* end = partial + blocks_of(rows[i].numel); partial != end; ++partial) {
      total.weights += partial->weights;
      total.directions += partial->directions;
    }
    visit_total(rows[i], total);
  }
}

// The second pass; rate_of(row) is the tensor's rate.
template <class RateOf>
void update_weights_of(const Kernels& kernels, const LambRow* rows, int64_t count, const LambScalars& scalars,
                       const float* directions, bool stream_copies, int threads, const RateOf& rate_of) {
  struct Context {
    const Kernels& kernels;
    const LambRow* rows;
    int64_t count;
    int64_t total;
    const LambScalars& scalars;
    const float* directions;
    bool stream_copies;
    const RateOf& rate_of;
  } context{kernels, rows, count, total_elements(rows, count), scalars, directions, stream_copies, rate_of};
  run_parts(
      useful_threads(context.total, threads),
      [](void* pointer, int part, int parts) {
        const Context& c = *static_cast<const Context*>(pointer);
        const auto& kernel = c.kernels.lamb.update[c.directions != nullptr];
        const auto update = [&](const LambRow& row, int64_t begin, int64_t end) {
          // From the end, which the first pass has touched last and the caches still have.
          for (int64_t last = end; last > begin;) {
            const int64_t first = std::max(begin, (last - 1) / kBlock * kBlock);
            kernel[weight_kind(row)](row, first, last, c.scalars, c.rate_of(row), c.stream_copies && row.copy != 0,
                                     c.directions);
            last = first;
          }
        };
        visit_part(c.rows, c.count, c.total, part, parts, update);
      },
      &context);
}

// Whether the copies of these rows are better stored past the caches.
bool stream_copies_of(const std::vector<LambRow>& rows) {
  constexpr int64_t kBytesPerElement = 16;
  return total_elements(rows.data(), static_cast<int64_t>(rows.size())) * kBytesPerElement > kStreamFromBytes;
}

// grad_factor: the address of a float, or 0. sums: the address of two doubles for every tensor, of which those of
// the rows are written.
void lamb_moments(int variant, const py::bytes& table, const py::tuple& settings, int64_t grad_factor, int64_t sums,
                  int threads) {
  const Kernels& kernels = kernels_at(variant);
  const auto rows = unpack_rows<LambRow>(table);
  const LambScalars scalars = scalars_of(settings, grad_factor);
  py::gil_scoped_release release;
  std::vector<LambSums> partials;
  move_moments_of(kernels, rows.data(), static_cast<int64_t>(rows.size()), scalars, nullptr, partials, threads,
                  [&](const LambRow& row, const LambSums& total) { address<LambSums>(sums)[row.index] = total; });
}

// rates: the address of a float for every tensor.
void lamb_update(int variant, const py::bytes& table, const py::tuple& settings, int64_t rates, int threads) {
  const Kernels& kernels = kernels_at(variant);
  const auto rows = unpack_rows<LambRow>(table);
  const LambScalars scalars = scalars_of(settings, 0);
  py::gil_scoped_release release;
  update_weights_of(kernels, rows.data(), static_cast<int64_t>(rows.size()), scalars, nullptr, stream_copies_of(rows),
                    threads, [&](const LambRow& row) { return address<const float>(rates)[row.index]; });
}

// Room for the directions of one tensor. It is kept from call to call: in fresh memory, each page's first touch would
// cost more than the pass that it saves.
class DirectionBuffer {
 public:
  explicit DirectionBuffer(int64_t count) : lock_(mutex(), std::try_to_lock) {
    std::vector<float>& memory = lock_ ? shared() : own_;
    if (static_cast<int64_t>(memory.size()) < count) memory.resize(static_cast<size_t>(count));
    data_ = memory.data();
  }
  float* data() { return data_; }

 private:
  static std::mutex& mutex() {
    static std::mutex instance;
    return instance;
  }
  static std::vector<float>& shared() {
    static std::vector<float> instance;
    return instance;
  }

  std::unique_lock<std::mutex> lock_;
  std::vector<float> own_;  // of a call beside which another one runs
  float* data_;
};

// As the two passes with rates of lr * |p| / |r|, but tensor by tensor, so that the second pass finds in the caches
// what the first has touched. The directions of tensors that the caches can hold are kept there between the passes.
void lamb_step(int variant, const py::bytes& table, const py::tuple& settings, double lr, int64_t grad_factor,
               int threads) {
  constexpr int64_t kKeptElements = int64_t{1} << 21;
  const Kernels& kernels = kernels_at(variant);
  const auto rows = unpack_rows<LambRow>(table);
  const LambScalars scalars = scalars_of(settings, grad_factor);
  py::gil_scoped_release release;
  int64_t longest = 0;
  for (const LambRow& row : rows) {
    if (row.numel <= kKeptElements) longest = std::max(longest, row.numel);
  }
  DirectionBuffer kept(longest);
  std::vector<LambSums> partials;
  const bool stream_copies = stream_copies_of(rows);
  for (const LambRow& row : rows) {
    float* directions = row.numel <= kKeptElements ? kept.data() : nullptr;
    float rate = 0.0f;
    move_moments_of(kernels, &row, 1, scalars, directions, partials, threads,
                    [&](const LambRow&, const LambSums& total) { rate = lamb_rate(total, lr); });
    update_weights_of(kernels, &row, 1, scalars, directions, stream_copies, threads,
                      [&](const LambRow&) { return rate; });
  }
}

}  // namespace

void bind_lamb(py::module_& m) {
  m.def("pack_lamb", &pack_lamb);
  m.def("lamb_moments", &lamb_moments);
  m.def("lamb_update", &lamb_update);
  m.def("lamb_step", &lamb_step);
}

}  // namespace bmt
