// Averages of factored second moments of matrices that are sharded over ranks: a rank's contribution to the sums of all
// ranks, and the averages and factors from these sums. Packing, for CUDA too, and the work on the CPU.
#include <algorithm>
#include <vector>

#include "common/arguments.h"
#include "common/averages.h"
#include "cpu/bindings.h"
#include "cpu/tensor_view.h"

namespace bmt {
namespace {

namespace py = pybind11;

bool fp32_view(PyObject* object, const Target& target, View& view) {
  return view_of(object, target, view) && view.dtype == static_cast<int64_t>(DType::kFloat32);
}

bool vector_view(py::handle object, const Target& target, int64_t least, View& view) {
  return fp32_view(object.ptr(), target, view) && view.ndim == 1 && view.numel >= least;
}

// Whether a vector has just as many elements.
bool exact_view(py::handle object, const Target& target, int64_t count, View& view) {
  return vector_view(object, target, count, view) && view.numel == count;
}

// Tensors of one dimension or more, by their last: (*, length).
struct Vectors {
  int64_t data;
  int64_t count;
  int64_t length;

  int64_t numel() const { return count * length; }
};

int64_t bytes_of(int64_t count) { return count * static_cast<int64_t>(sizeof(float)); }

// Appends those of a list; false if it is anything else. `elements` and `count` grow by what they have.
bool read_vectors(py::handle list, const Target& target, std::vector<Vectors>& vectors, int64_t& elements,
                  int64_t& count) {
  const Items items(list);
  for (Py_ssize_t i = 0; i < items.size(); ++i) {
    View view;
    if (!fp32_view(items[i], target, view) || view.ndim < 1) return false;
    Vectors found{view.data, 1, view.shape[view.ndim - 1]};
    for (int32_t d = 0; d + 1 < view.ndim; ++d) found.count *= view.shape[d];
    vectors.push_back(found);
    elements += view.numel;
    count += found.count;
  }
  return items.size() >= 0;
}

void extend(std::vector<Interval>& intervals, const Vectors& vectors) {
  if (vectors.numel() != 0) intervals.push_back({vectors.data, vectors.data + bytes_of(vectors.numel())});
}

void extend(std::vector<Interval>& intervals, const View& view) {
  if (view.numel != 0) intervals.push_back({view.data, view.data + view.bytes()});
}

// A row for each of row_averages, or None if a tensor is not as it must be.
py::object pack_totals(py::handle row_averages, py::handle row_sums, py::handle totals, py::handle before,
                       py::handle device, int device_type, int device_index) {
  if (!tensors_are_readable()) return py::none();
  const Target target{device, device_type, device_index};
  std::vector<Vectors> rows;
  int64_t elements = 0, count = 0;
  View sums, total, old;
  if (!read_vectors(row_averages, target, rows, elements, count)) return py::none();
  if (!exact_view(row_sums, target, elements, sums)) return py::none();
  if (!exact_view(totals, target, count, total) || !exact_view(before, target, count, old)) return py::none();
  std::vector<Interval> outputs, inputs;
  for (const Vectors& row : rows) extend(inputs, row);
  extend(inputs, sums);
  extend(outputs, total);
  extend(outputs, old);
  if (overlapping(outputs, inputs)) return py::none();
  std::vector<AverageRow> table;
  for (const Vectors& row : rows) {
    if (row.count == 0) continue;
    table.push_back({row.data, sums.data, 0, total.data, old.data, row.count, row.length, row.numel(), 0.0, 0.0});
    sums.data += bytes_of(row.numel());
    total.data += bytes_of(row.count);
    old.data += bytes_of(row.count);
  }
  return to_bytes(table);
}

// Whether `list` holds `count` numbers, which are appended.
bool read_counts(py::handle list, size_t count, std::vector<double>& counts) {
  const Items items(list);
  if (items.size() != static_cast<Py_ssize_t>(count)) return false;
  for (Py_ssize_t i = 0; i < items.size(); ++i) {
    counts.push_back(PyFloat_AsDouble(items[i]));
    if (PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      return false;
    }
  }
  return true;
}

// A row for each of row_averages and of col_averages, and one for the factors beyond those; or None.
py::object pack_averages(py::handle row_averages, py::handle col_averages, py::handle row_sums, py::handle col_sums,
                         py::handle totals, py::handle before, py::handle heights, py::handle widths,
                         py::handle row_factors, py::handle col_factors, py::handle device, int device_type,
                         int device_index) {
  if (!tensors_are_readable()) return py::none();
  const Target target{device, device_type, device_index};
  std::vector<Vectors> rows, cols;
  int64_t row_elements = 0, col_elements = 0, row_count = 0, col_count = 0;
  if (!read_vectors(row_averages, target, rows, row_elements, row_count)) return py::none();
  if (!read_vectors(col_averages, target, cols, col_elements, col_count)) return py::none();
  std::vector<double> height, width;
  if (!read_counts(heights, cols.size(), height) || !read_counts(widths, rows.size(), width)) return py::none();
  if (cols.size() < rows.size()) return py::none();
  View sums[2], total, old, factors[2];
  if (!exact_view(row_sums, target, row_elements, sums[0])) return py::none();
  if (!exact_view(col_sums, target, col_elements, sums[1])) return py::none();
  if (!exact_view(totals, target, row_count, total) || !exact_view(before, target, row_count, old)) return py::none();
  if (!vector_view(row_factors, target, row_elements, factors[0])) return py::none();
  if (!vector_view(col_factors, target, col_elements, factors[1])) return py::none();
  std::vector<Interval> outputs, inputs;
  for (const std::vector<Vectors>& averages : {rows, cols}) {
    for (const Vectors& average : averages) extend(outputs, average);
  }
  for (int i = 0; i < 2; ++i) {
    extend(outputs, factors[i]);
    if (sums[i].data != factors[i].data) extend(inputs, sums[i]);  // a sum is read before its factor takes its place
  }
  extend(inputs, total);
  extend(inputs, old);
  if (overlapping(outputs, inputs)) return py::none();
  std::vector<AverageRow> table;
  for (int side = 0; side < 2; ++side) {
    const std::vector<Vectors>& averages = side == 0 ? rows : cols;
    int64_t sum = sums[side].data, factor = factors[side].data, left = factors[side].numel;
    for (size_t i = 0; i < averages.size(); ++i) {
      const Vectors& average = averages[i];
      AverageRow row{average.data,   sum,            factor,          0,         0,
                     average.count,  average.length, average.numel(), height[i], height[i]};
      if (side == 0) {
        row.totals = total.data;
        row.before = old.data;
        row.count = width[i];
        total.data += bytes_of(average.count);
        old.data += bytes_of(average.count);
      }
      if (row.numel != 0) table.push_back(row);
      sum += bytes_of(row.numel);
      factor += bytes_of(row.numel);
      left -= row.numel;
    }
    if (left != 0) table.push_back({0, 0, factor, 0, 0, 1, left, left, 1.0, 1.0});
  }
  return to_bytes(table);
}

double sum_of(const float* values, int64_t count) {
  double sum = 0.0;
  for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(values[i]);
  return sum;
}

void factored_totals(const py::bytes& table) {
  for (const AverageRow& row : unpack_rows<AverageRow>(table)) {
    for (int64_t v = 0; v < row.vectors; ++v) {
      const int64_t first = v * row.length;
      address<float>(row.totals)[v] = static_cast<float>(sum_of(address<float>(row.sums) + first, row.length));
      address<float>(row.before)[v] = static_cast<float>(sum_of(address<float>(row.average) + first, row.length));
    }
  }
}

void factored_averages(const py::bytes& table, double decay) {
  for (const AverageRow& row : unpack_rows<AverageRow>(table)) {
    auto* factors = address<float>(row.factors);
    if (row.average == 0) {
      std::fill(factors, factors + row.numel, 1.0f);
      continue;
    }
    auto* averages = address<float>(row.average);
    const auto* sums = address<float>(row.sums);
    const AverageWeights weights = average_weights(row, decay);
    for (int64_t v = 0; v < row.vectors; ++v) {
      const float unit = average_unit(row, v, decay);
      const int64_t first = v * row.length, last = first + row.length;
      for (int64_t i = first; i < last; ++i) averages[i] = moved_average(weights, averages[i], sums[i]);
      for (int64_t i = first; i < last; ++i) factors[i] = average_factor(averages[i], unit);
    }
  }
}

}  // namespace

void bind_factored_averages(py::module_& m) {
  m.def("pack_totals", &pack_totals);
  m.def("pack_averages", &pack_averages);
  m.def("factored_totals", &factored_totals);
  m.def("factored_averages", &factored_averages);
}

}  // namespace bmt
