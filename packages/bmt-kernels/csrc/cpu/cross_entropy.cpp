// Cross entropy over rows of logits: threads, Python.
#include <algorithm>
#include <cstring>

#include "common/arguments.h"
#include "common/cross_entropy.h"
#include "cpu/bindings.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace bmt {
namespace {

namespace py = pybind11;

// visit(row) for every row, on several threads; each takes neighbouring rows.
template <class Visit>
void visit_rows(const CrossEntropyRows& rows, int threads, Visit visit) {
  struct Context {
    int64_t rows;
    Visit& visit;
  } context{rows.rows, visit};
  const int useful = useful_threads(rows.rows * rows.columns, threads);
  run_parts(
      static_cast<int>(std::clamp<int64_t>(rows.rows, 1, useful)),
      [](void* pointer, int part, int parts) {
        Context& c = *static_cast<Context*>(pointer);
        const int64_t end = c.rows * (part + 1) / parts;
        for (int64_t row = c.rows * part / parts; row < end; ++row) c.visit(row);
      },
      &context);
}

const char* row_address(const CrossEntropyRows& rows, int64_t row) {
  return address<const char>(rows.logits) + row * rows.stride * item_size(static_cast<DType>(rows.dtype));
}

const float* column_weights(const CrossEntropyRows& rows) {
  return rows.weight == 0 ? nullptr : address<const float>(rows.weight) + rows.first_class;
}

int kind_of_sum(const CrossEntropyRows& rows, bool smooth) {
  return !smooth ? kNoSum : rows.weight == 0 ? kPlainSum : kWeightedSum;
}

CrossEntropyRows rows_of(const py::bytes& packed) { return unpack_rows<CrossEntropyRows>(packed).at(0); }

// out: (kinds, rows), in the order of CrossEntropyStatistic. Rows to be ignored get zeros.
void statistics(int variant, const py::bytes& packed, bool smooth, int64_t out, int threads) {
  const auto rows = rows_of(packed);
  const auto make = kernels_at(variant).cross_entropy.statistics[rows.dtype][kind_of_sum(rows, smooth)];
  auto* to = address<float>(out);
  py::gil_scoped_release release;
  visit_rows(rows, threads, [&](int64_t row) {
    const bool ignored = address<const int64_t>(rows.target)[row] == rows.ignore_index;
    RowStatistics result{0.0f, 0.0f, 0.0f};
    if (!ignored) result = make(row_address(rows, row), column_weights(rows), rows.columns);
    to[kLargest * rows.rows + row] = result.largest;
    to[kSum * rows.rows + row] = result.sum;
    to[kTargetLogit * rows.rows + row] = ignored ? 0.0f : target_logit(rows, row);
    if (smooth) to[kLogitSum * rows.rows + row] = result.logit_sum;
  });
}

// losses: (rows,); normalizers: (2, rows), the largest logits and the sums. All variants do this alike.
void losses(int, const py::bytes& packed, double smoothing, int64_t classes, int64_t total_weight, int64_t statistics,
            int64_t ranks, int64_t losses, int64_t normalizers) {
  const auto rows = rows_of(packed);
  const auto factors = cross_entropy_factors(smoothing, classes, total_weight);
  py::gil_scoped_release release;
  for (int64_t row = 0; row < rows.rows; ++row) {
    cross_entropy_row_loss(rows, factors, address<const float>(statistics), ranks, row, address<float>(losses) + row,
                           address<float>(normalizers) + row, address<float>(normalizers) + rows.rows + row);
  }
}

// scale: of each row's loss, `scale_stride` elements apart (0: one for all), divided by *denominator if that is given.
// out: rows of the logits' dtype, `out_stride` elements apart; they may be the logits.
void gradient(int variant, const py::bytes& packed, double smoothing, int64_t classes, int64_t total_weight,
              int64_t normalizers, int64_t scale, int64_t scale_stride, int64_t denominator, int64_t out,
              int64_t out_stride, int threads) {
  const auto rows = rows_of(packed);
  const auto factors = cross_entropy_factors(smoothing, classes, total_weight);
  const auto make = kernels_at(variant).cross_entropy.gradient[rows.dtype][kind_of_sum(rows, factors.smooth)];
  const int64_t item = item_size(static_cast<DType>(rows.dtype));
  const float divisor = denominator == 0 ? 1.0f : *address<const float>(denominator);
  py::gil_scoped_release release;
  visit_rows(rows, threads, [&](int64_t row) {
    const float* normalizer = address<const float>(normalizers) + row;
    const auto of_row = cross_entropy_gradient_row(rows, factors, normalizer[0], normalizer[rows.rows],
                                                   address<const float>(scale)[row * scale_stride] / divisor, row);
    char* to = address<char>(out) + row * out_stride * item;
    if (of_row.ignored) {
      std::memset(to, 0, static_cast<size_t>(rows.columns * item));
    } else {
      make(row_address(rows, row), to, column_weights(rows), rows.columns, of_row);
    }
  });
}

}  // namespace

void bind_cross_entropy(py::module_& m) {
  m.def("cross_entropy_statistics", &statistics);
  m.def("cross_entropy_losses", &losses);
  m.def("cross_entropy_gradient", &gradient);
}

}  // namespace bmt
