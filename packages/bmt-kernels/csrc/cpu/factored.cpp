// Factored second moments over a table of rows: packing, threads, Python.
#include <memory>
#include <vector>

#include "common/arguments.h"
#include "cpu/bindings.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
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

struct TileSize {
  int64_t rows;
  int64_t cols;
};
constexpr TileSize kSumTile{kFactoredTileRows, kFactoredTileCols};
constexpr TileSize kUpdateTile{kFactoredUpdateRows, kFactoredUpdateCols};

FactoredTiles sum_tiles(const FactoredRow& row) { return tiles_of(row, kSumTile.rows, kSumTile.cols); }

// All tiles of all rows, laid end to end, are cut into `parts` pieces of nearly as many elements;
// visit(row_number, tile_number, tile) is called for those of piece `part`.
template <class Visit>
void visit_tiles(const std::vector<FactoredRow>& rows, TileSize size, int64_t total, int part, int parts,
                 const Visit& visit) {
  const auto cut = [&](int p) {
    return p == parts ? total : static_cast<int64_t>(static_cast<double>(total) * p / parts);
  };
  const int64_t first = cut(part), last = cut(part + 1);
  int64_t start = 0;
  for (size_t i = 0; i < rows.size() && start < last; ++i) {
    const FactoredRow& row = rows[i];
    const int64_t numel = elements(row);
    const FactoredTiles tiles = tiles_of(row, size.rows, size.cols);
    const auto within = [&](int64_t position) {
      if (position <= start) return int64_t{0};
      if (position >= start + numel) return tiles.count;
      return static_cast<int64_t>(static_cast<double>(position - start) / static_cast<double>(numel) *
                                  static_cast<double>(tiles.count));
    };
    const int64_t end = within(last);
    for (int64_t number = within(first); number < end; ++number) {
      const int64_t strip = number / tiles.along;
      const int64_t top = strip % tiles.down * size.rows;
      const int64_t left = number % tiles.along * size.cols;
      const FactoredTile tile{strip / tiles.down, top, left, std::min(size.rows, row.rows - top),
                              std::min(size.cols, row.cols - left)};
      visit(i, number, tile);
    }
    start += numel;
  }
}

// Runs visit(row_number, tile_number, tile) over all tiles on several threads.
template <class Visit>
void run_tiles(const std::vector<FactoredRow>& rows, TileSize size, int threads, const Visit& visit) {
  struct Context {
    const std::vector<FactoredRow>& rows;
    TileSize size;
    int64_t total;
    const Visit& visit;
  } context{rows, size, 0, visit};
  for (const FactoredRow& row : rows) context.total += elements(row);
  run_parts(
      useful_threads(context.total, threads),
      [](void* pointer, int part, int parts) {
        const Context& c = *static_cast<const Context*>(pointer);
        visit_tiles(c.rows, c.size, c.total, part, parts, c.visit);
      },
      &context);
}

// out[b][i] = sum over t of partial[b][t][i], in that order and in double precision; numel counts b and i.
struct Combination {
  const float* partial;
  float* out;
  int64_t terms;
  int64_t length;
  int64_t numel;
};

void combine(const Combination& c, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = 256;
  double sums[kBlock];
  for (int64_t at = begin; at < end;) {
    const int64_t batch = at / c.length, i = at % c.length;
    const int64_t n = std::min({kBlock, c.length - i, end - at});
    const float* partial = c.partial + batch * c.terms * c.length + i;
    std::fill(sums, sums + n, 0.0);
    for (int64_t t = 0; t < c.terms; ++t, partial += c.length) {
      for (int64_t k = 0; k < n; ++k) sums[k] += static_cast<double>(partial[k]);
    }
    for (int64_t k = 0; k < n; ++k) c.out[at + k] = static_cast<float>(sums[k]);
    at += n;
  }
}

using SumsKernel = void (*)(const FactoredRow&, const FactoredTile&, const FactoredScalars&, float*, float*);

void sum_rows_and_columns(const SumsKernel* kernels, const std::vector<FactoredRow>& rows,
                          const FactoredScalars& scalars, int threads) {
  std::vector<int64_t> offsets;  // of a row's partial row sums; its partial column sums follow them
  int64_t partials = 0;
  for (const FactoredRow& row : rows) {
    const FactoredTiles tiles = sum_tiles(row);
    offsets.push_back(partials);
    partials += row.batch * (tiles.along * row.rows + tiles.down * row.cols);
  }
  const std::unique_ptr<float[]> workspace(new float[static_cast<size_t>(partials)]);
  std::vector<Combination> combinations;
  for (size_t i = 0; i < rows.size(); ++i) {
    const FactoredRow& row = rows[i];
    const FactoredTiles tiles = sum_tiles(row);
    const float* partial = workspace.get() + offsets[i];
    combinations.push_back({partial, address<float>(row.row_sums), tiles.along, row.rows, row.batch * row.rows});
    partial += row.batch * tiles.along * row.rows;
    combinations.push_back({partial, address<float>(row.col_sums), tiles.down, row.cols, row.batch * row.cols});
  }

  run_tiles(rows, kSumTile, threads, [&](size_t i, int64_t number, const FactoredTile& tile) {
    const FactoredRow& row = rows[i];
    const FactoredTiles tiles = sum_tiles(row);
    float* row_partials = workspace.get() + offsets[i];
    float* col_partials = row_partials + row.batch * tiles.along * row.rows;
    row_partials += (tile.batch * tiles.along + number % tiles.along) * row.rows + tile.row;
    col_partials += number / tiles.along * row.cols + tile.col;
    kernels[grad_kind(row)](row, tile, scalars, row_partials, col_partials);
  });

  struct Context {
    const std::vector<Combination>& combinations;
    int64_t total;
  } context{combinations, total_elements(combinations.data(), static_cast<int64_t>(combinations.size()))};
  run_parts(
      useful_threads(partials, threads),
      [](void* pointer, int part, int parts) {
        const Context& c = *static_cast<const Context*>(pointer);
        visit_part(c.combinations.data(), static_cast<int64_t>(c.combinations.size()), c.total, part, parts, combine);
      },
      &context);
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
  std::vector<std::vector<double>> partials;
  for (const FactoredRow& row : rows) partials.emplace_back(static_cast<size_t>(sum_tiles(row).count));
  run_tiles(rows, kSumTile, threads, [&](size_t i, int64_t number, const FactoredTile& tile) {
    const FactoredRow& row = rows[i];
    partials[i][static_cast<size_t>(number)] =
        kernels.factored.update_square_sum[grad_kind(row)](row, tile, scalars);
  });
  for (size_t i = 0; i < rows.size(); ++i) {
    double sum = 0.0;
    for (const double partial : partials[i]) sum += partial;
    address<float>(out)[rows[i].index] = static_cast<float>(sum);
  }
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
  run_tiles(rows, kUpdateTile, threads, [&](size_t i, int64_t, const FactoredTile& tile) {
    const FactoredRow& row = rows[i];
    kernels.factored.update[weight_kind(row)][grad_kind(row)](row, tile, scalars);
  });
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
