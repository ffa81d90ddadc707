// Turning the arguments that Python passes into the structs that the kernels take.
#pragma once

#include <pybind11/pybind11.h>

#include <cstring>
#include <vector>

#include "common/adam.h"
#include "common/table.h"

namespace bmt {

// A copy of the rows in a packed table (bytes carry no alignment).
template <class Row>
std::vector<Row> unpack_rows(const pybind11::bytes& table) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(table.ptr(), &data, &size) != 0) throw pybind11::error_already_set();
  if (size % static_cast<Py_ssize_t>(sizeof(Row)) != 0) throw pybind11::value_error("table of rows has a wrong size");
  std::vector<Row> rows(static_cast<size_t>(size) / sizeof(Row));
  if (size != 0) std::memcpy(rows.data(), data, static_cast<size_t>(size));
  return rows;
}

// In the order of _scalars in adam.py.
inline AdamScalars adam_scalars(double grad_factor, double beta1, double one_minus_beta1, double beta2,
                                double one_minus_beta2, double decay_factor, double l2, double denom_factor, double eps,
                                double step_size, bool decoupled, bool update) {
  const auto f = [](double x) { return static_cast<float>(x); };
  return {f(grad_factor),  f(beta1), f(one_minus_beta1), f(beta2),  f(one_minus_beta2), f(decay_factor), f(l2),
          f(denom_factor), f(eps),   f(step_size),       decoupled, update};
}

}  // namespace bmt
