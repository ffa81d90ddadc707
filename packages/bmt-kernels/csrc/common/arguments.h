// Reading what Python passes to the compiled modules.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <vector>


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

}  // namespace bmt
