// Averages of factored second moments of matrices that are cut between ranks: what a rank gives to the sums of all, and
// the averages and factors that come out of these.
#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/bindings.h"
#include "cpu/tensor_view.h"

namespace bmt {
namespace {

namespace py = pybind11;

double sum_of(const float* values, int64_t count) {
  double sum = 0.0;
  for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(values[i]);
  return sum;
}

// average <- average * decay + sum * (1 - decay) / count
void move_average(float* average, const float* sum, int64_t length, double decay, double count) {
  const auto kept = static_cast<float>(decay);
  const auto weight = static_cast<float>((1.0 - decay) / count);
  for (int64_t i = 0; i < length; ++i) average[i] = average[i] * kept + sum[i] * weight;
}

// factor <- 1 / sqrt(average / unit)
void find_factors(float* factor, const float* average, int64_t length, float unit) {
  for (int64_t i = 0; i < length; ++i) factor[i] = 1.0f / std::sqrt(average[i] / unit);
}

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

float* numbers(const View& view) { return reinterpret_cast<float*>(view.data); }

// Tensors of one dimension or more, by their last: (*, length).
struct Vectors {
  float* data;
  int64_t count;
  int64_t length;
};

// Appends those of a list; false if it is anything else. `elements` and `count` grow by what they have.
bool read_vectors(py::handle list, const Target& target, std::vector<Vectors>& vectors, int64_t& elements,
                  int64_t& count) {
  const Items items(list);
  for (Py_ssize_t i = 0; i < items.size(); ++i) {
    View view;
    if (!fp32_view(items[i], target, view) || view.ndim < 1) return false;
    Vectors found{numbers(view), 1, view.shape[view.ndim - 1]};
    for (int32_t d = 0; d + 1 < view.ndim; ++d) found.count *= view.shape[d];
    vectors.push_back(found);
    elements += view.numel;
    count += found.count;
  }
  return items.size() >= 0;
}

void extend(std::vector<Interval>& intervals, const Vectors& vectors) {
  const auto begin = reinterpret_cast<int64_t>(vectors.data);
  const int64_t bytes = vectors.count * vectors.length * static_cast<int64_t>(sizeof(float));
  if (bytes != 0) intervals.push_back({begin, begin + bytes});
}

void extend(std::vector<Interval>& intervals, const View& view) {
  if (view.numel != 0) intervals.push_back({view.data, view.data + view.bytes()});
}

// Returns whether it was done: every tensor is as it must be.
bool factored_totals(py::handle row_averages, py::handle row_sums, py::handle totals, py::handle before,
                     py::handle device, int device_type, int device_index) {
  if (!tensors_are_readable()) return false;
  const Target target{device, device_type, device_index};
  std::vector<Vectors> rows;
  int64_t elements = 0, count = 0;
  View sums, total, old;
  if (!read_vectors(row_averages, target, rows, elements, count)) return false;
  if (!exact_view(row_sums, target, elements, sums)) return false;
  if (!exact_view(totals, target, count, total) || !exact_view(before, target, count, old)) return false;
  std::vector<Interval> outputs, inputs;
  for (const Vectors& row : rows) extend(inputs, row);
  extend(inputs, sums);
  extend(outputs, total);
  extend(outputs, old);
  if (overlapping(outputs, inputs)) return false;
  const float* sum = numbers(sums);
  float *to_total = numbers(total), *to_old = numbers(old);
  for (const Vectors& row : rows) {
    for (int64_t b = 0; b < row.count; ++b) {
      *to_total++ = static_cast<float>(sum_of(sum, row.length));
      *to_old++ = static_cast<float>(sum_of(row.data + b * row.length, row.length));
      sum += row.length;
    }
  }
  return true;
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

bool factored_averages(py::handle row_averages, py::handle col_averages, py::handle row_sums, py::handle col_sums,
                       py::handle totals, py::handle before, py::handle heights, py::handle widths, double decay,
                       py::handle row_factors, py::handle col_factors, py::handle device, int device_type,
                       int device_index) {
  if (!tensors_are_readable()) return false;
  const Target target{device, device_type, device_index};
  std::vector<Vectors> rows, cols;
  int64_t row_elements = 0, col_elements = 0, row_count = 0, col_count = 0;
  if (!read_vectors(row_averages, target, rows, row_elements, row_count)) return false;
  if (!read_vectors(col_averages, target, cols, col_elements, col_count)) return false;
  std::vector<double> height, width;
  if (!read_counts(heights, cols.size(), height) || !read_counts(widths, rows.size(), width)) return false;
  if (cols.size() < rows.size()) return false;
  View sums[2], total, old, factors[2];
  if (!exact_view(row_sums, target, row_elements, sums[0])) return false;
  if (!exact_view(col_sums, target, col_elements, sums[1])) return false;
  if (!exact_view(totals, target, row_count, total) || !exact_view(before, target, row_count, old)) return false;
  if (!vector_view(row_factors, target, row_elements, factors[0])) return false;
  if (!vector_view(col_factors, target, col_elements, factors[1])) return false;
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
  if (overlapping(outputs, inputs)) return false;
  const float *sum = numbers(sums[0]), *of_all = numbers(total), *of_old = numbers(old);
  float* factor = numbers(factors[0]);
  for (size_t i = 0; i < rows.size(); ++i) {
    for (int64_t b = 0; b < rows[i].count; ++b) {
      float* average = rows[i].data + b * rows[i].length;
      move_average(average, sum, rows[i].length, decay, width[i]);
      const double mean = decay * static_cast<double>(*of_old++) / height[i] +
                          (1.0 - decay) * static_cast<double>(*of_all++) / (height[i] * width[i]);
      find_factors(factor, average, rows[i].length, static_cast<float>(mean));
      sum += rows[i].length;
      factor += rows[i].length;
    }
  }
  std::fill(factor, numbers(factors[0]) + factors[0].numel, 1.0f);
  sum = numbers(sums[1]);
  factor = numbers(factors[1]);
  for (size_t i = 0; i < cols.size(); ++i) {
    const int64_t length = cols[i].count * cols[i].length;
    move_average(cols[i].data, sum, length, decay, height[i]);
    find_factors(factor, cols[i].data, length, 1.0f);
    sum += length;
    factor += length;
  }
  std::fill(factor, numbers(factors[1]) + factors[1].numel, 1.0f);
  return true;
}

}  // namespace

void bind_factored_averages(py::module_& m) {
  m.def("factored_totals", &factored_totals);
  m.def("factored_averages", &factored_averages);
}

}  // namespace bmt
