// Reading the addresses, shapes and dtypes of many tensors in one call, and checking them.
//
// This is the fast way through _tables.py: it accepts the plain case and builds the same table of rows. On
// anything unusual it declines without a word, and the Python code decides what is wrong, or that nothing is.
#pragma once

#include <pybind11/pybind11.h>

namespace bmt {

// To be called before the others with torch.Tensor and its dtypes in the order of DType. Returns whether tensors
// are read through the DLPack exchange functions (torch >= 2.10) rather than through their Python attributes.
bool set_tensor_type(pybind11::object tensor_type, pybind11::tuple dtypes, bool allow_exchange);

// Bytes of AdamRow[], one row per non-empty tensor, or None. masters: None or a list with None entries.
// device is the torch.device of the tensors, device_type and device_index what DLPack calls it.
pybind11::object pack_adam(pybind11::handle params, pybind11::handle grads, pybind11::handle exp_avgs,
                           pybind11::handle exp_avg_sqs, pybind11::handle masters, pybind11::handle device, int device_type, int device_index);

// Bytes of DataRow[], one row per non-empty tensor, or None.
pybind11::object pack_data(pybind11::handle tensors, pybind11::handle device, int device_type, int device_index);

}  // namespace bmt
