// Stochastic rounding of one tensor: threads, Python.
#include "common/arguments.h"
#include "common/rounding.h"
#include "cpu/bindings.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace bmt {
namespace {

namespace py = pybind11;

template <bool kToHalf>
void round_range(const RoundingRow& row, int64_t begin, int64_t end) {
  const bool adjacent = row.width >= row.numel;
  for (int64_t i = begin; i < end; ++i) round_element<kToHalf>(row, adjacent, i);
}

void round_stochastically(const py::bytes& packed, bool to_half, int threads) {
  struct Context {
    RoundingRow row;
    bool to_half;
  } context{unpack_rows<RoundingRow>(packed).at(0), to_half};
  py::gil_scoped_release release;
  run_parts(
      useful_threads(context.row.numel, threads),
      [](void* pointer, int part, int parts) {
        const Context& c = *static_cast<const Context*>(pointer);
        visit_part(&c.row, 1, c.row.numel, part, parts, [&](const RoundingRow& row, int64_t begin, int64_t end) {
          c.to_half ? round_range<true>(row, begin, end) : round_range<false>(row, begin, end);
        });
      },
      &context);
}

}  // namespace

void bind_rounding(py::module_& m) { m.def("round_stochastically", &round_stochastically); }

}  // namespace bmt
