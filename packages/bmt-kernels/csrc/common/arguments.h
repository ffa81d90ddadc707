// Reading what Python passes to the compiled modules.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "common/adam.h"
#include "common/lamb.h"

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

// A tuple in the order of AdamSettings.
inline AdamSettings adam_settings(const pybind11::tuple& values) {
  if (values.size() != 10) throw pybind11::value_error("an Adam step has 10 settings");
  const auto number = [&](size_t i) { return values[i].cast<double>(); };
  return {number(0), number(1), number(2), number(3), number(4),
          number(5), number(6), number(7), values[8].cast<bool>(), values[9].cast<bool>()};
}

// A tuple in the order of LambSettings.
inline LambSettings lamb_settings(const pybind11::tuple& values) {
  if (values.size() != 7) throw pybind11::value_error("a LAMB step has 7 settings");
  const auto number = [&](size_t i) { return values[i].cast<double>(); };
  return {number(0), number(1), number(2), number(3), number(4), number(5), values[6].cast<bool>()};
}

}  // namespace bmt
