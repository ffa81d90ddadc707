// Reading the addresses, shapes and dtypes of many tensors in one call, and checking them.
//
// This is the fast way through _tables.py: it accepts the plain case and builds the same table of rows. On
// anything unusual it declines without a word, and the Python code decides what is wrong, or that nothing is.
#pragma once

#include <pybind11/pybind11.h>

namespace bmt {

// Gives pack_* the class torch.Tensor. Returns whether it offers the DLPack exchange functions (torch >= 2.10)
// that make reading a tensor a matter of nanoseconds; without them pack_* declines everything.
bool set_tensor_type(pybind11::object tensor_type);

// Bytes of AdamRow[], one row per non-empty tensor, or None. masters: None or a list with None entries.
pybind11::object pack_adam(pybind11::handle params, pybind11::handle grads, pybind11::handle exp_avgs,
                           pybind11::handle exp_avg_sqs, pybind11::handle masters, int device_type, int device_index);

// Bytes of DataRow[], one row per non-empty tensor, or None.
pybind11::object pack_data(pybind11::handle tensors, int device_type, int device_index);

}  // namespace bmt
