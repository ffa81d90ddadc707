// Whole steps of Adafactor and CAME for matrices that are here as a whole: their passes one after the other, matrix by
// matrix, so that the later ones find in the caches what the first has read.
#include <cmath>
#include <vector>

#include "common/arguments.h"
#include "cpu/averages.h"
#include "cpu/bindings.h"
#include "cpu/factored_passes.h"

namespace bmt {
namespace {

namespace py = pybind11;

// In a table of steps, a row's sums are the averages of squares in the state, and its factors are those of CAME's
// residuals, or 0.
struct Averages {
  float* rows;
  float* cols;
};

Averages square_averages(const FactoredRow& row) { return {address<float>(row.row_sums), address<float>(row.col_sums)}; }

Averages residual_averages(const FactoredRow& row) {
  return {address<float>(row.row_factors), address<float>(row.col_factors)};
}

// A matrix's sums and factors within a step.
class Statistics {
 public:
  explicit Statistics(const FactoredRow& row)
      : row_count_(static_cast<size_t>(row.batch * row.rows)),
        col_count_(static_cast<size_t>(row.batch * row.cols)),
        values_(2 * (row_count_ + col_count_)) {}

  float* row_sums() { return values_.data(); }
  float* col_sums() { return row_sums() + row_count_; }
  float* row_factors() { return col_sums() + col_count_; }
  float* col_factors() { return row_factors() + row_count_; }

  void use_in(FactoredRow& row) {
    row.row_sums = reinterpret_cast<int64_t>(row_sums());
    row.col_sums = reinterpret_cast<int64_t>(col_sums());
    row.row_factors = reinterpret_cast<int64_t>(row_factors());
    row.col_factors = reinterpret_cast<int64_t>(col_factors());
  }

  // average <- beta * average + (1 - beta) * mean, and the factors whose products are 1 / sqrt(average).
  void move(const Averages& averages, const FactoredRow& row, double beta) {
    const auto rows = static_cast<double>(row.rows), cols = static_cast<double>(row.cols);
    for (int64_t b = 0; b < row.batch; ++b) {
      float* average = averages.rows + b * row.rows;
      float* factor = row_factors() + b * row.rows;
      move_average(average, row_sums() + b * row.rows, row.rows, beta, cols);
      if (row.rows == 1) {
        *factor = 1.0f;
      } else {
        find_factors(factor, average, row.rows, static_cast<float>(sum_of(average, row.rows) / rows));
      }
    }
    const auto length = static_cast<int64_t>(col_count_);
    move_average(averages.cols, col_sums(), length, beta, rows);
    find_factors(col_factors(), averages.cols, length, 1.0f);
  }

  void set_factors_to_one() { std::fill(row_factors(), values_.data() + values_.size(), 1.0f); }

 private:
  size_t row_count_, col_count_;
  std::vector<float> values_;
};

float root_mean_square(double sum, const FactoredRow& row) {
  return static_cast<float>(std::sqrt(sum / static_cast<double>(elements(row))));
}

double sum_squared_weights(const Kernels& kernels, const FactoredRow& row, int threads) {
  std::vector<double> partials(static_cast<size_t>(blocks_of(elements(row))));
  struct Context {
    const Kernels& kernels;
    const FactoredRow& row;
    std::vector<double>& partials;
  } context{kernels, row, partials};
  run_parts(
      useful_threads(elements(row), threads),
      [](void* pointer, int part, int parts) {
        const Context& c = *static_cast<const Context*>(pointer);
        const auto blocks = static_cast<int64_t>(c.partials.size());
        const int dtype = weight_dtype(c.row);
        for (int64_t block = blocks * part / parts; block < blocks * (part + 1) / parts; ++block) {
          const int64_t begin = block * kBlock;
          const auto* data = address<const char>(c.row.weight) + begin * item_size(static_cast<DType>(dtype));
          c.partials[static_cast<size_t>(block)] =
              c.kernels.norms.block[kSquares][dtype](data, std::min(kBlock, elements(c.row) - begin), 2.0);
        }
      },
      &context);
  double sum = 0.0;
  for (const double partial : partials) sum += partial;
  return sum;
}

// What gradients are multiplied by, and the numbers that both optimizers have.
struct Settings {
  double inverse_grad_scale;
  int64_t grad_factor;
  double lr;
  double beta1;
  double beta2;
  double eps;
  double clip_threshold;
  double weight_decay;
};

Settings unpack_settings(const py::tuple& values, int64_t grad_factor) {
  if (values.size() != 7) throw py::value_error("a factored step has 7 settings");
  const auto number = [&](size_t i) { return values[i].cast<double>(); };
  return {number(0), grad_factor, number(1), number(2), number(3), number(4), number(5), number(6)};
}

// Moves the averages of squares of a matrix of the state `row` and leaves their factors in `statistics`.
// Returns max(1, RMS(u) / clip_threshold).
float begin_step(const Kernels& kernels, const FactoredRow& row, const Settings& settings, int threads,
                 Statistics& statistics, FactoredRow& at) {
  at = row;
  statistics.use_in(at);
  const auto scalars =
      factored_scalars(settings.inverse_grad_scale, settings.grad_factor, settings.eps, 0.0, 1.0, 0, 0, 0);
  sum_rows_and_columns(kernels.factored.square_sums, {at}, scalars, threads);
  statistics.move(square_averages(row), row, settings.beta2);
  const double sum = sum_squared_updates(kernels.factored, {at}, scalars, threads).front();
  const float ratio = root_mean_square(sum, row) / static_cast<float>(settings.clip_threshold);
  return ratio < 1.0f ? 1.0f : ratio;  // a NaN stays
}

// The last pass: weight <- weight * decay - direction * step_size, or with moments if at.exp_avg is not 0.
void end_step(const Kernels& kernels, FactoredRow at, const Settings& settings, double beta1, float step_size,
              float decay, int threads) {
  at.index = 0;  // in the scalars here
  const auto scalars = factored_scalars(settings.inverse_grad_scale, settings.grad_factor, 0.0, beta1, 1.0 - beta1,
                                        reinterpret_cast<int64_t>(&step_size), reinterpret_cast<int64_t>(&decay), 0);
  update_weights(kernels.factored, {at}, scalars, threads);
}

// sizes: the address of a float for every tensor, to which RMS(weights) goes, or 0: not to scale by it.
void adafactor_step(int variant, const py::bytes& table, const py::tuple& settings_, int64_t grad_factor,
                    double least_size, int64_t sizes, int threads) {
  const Kernels& kernels = kernels_at(variant);
  const auto rows = unpack_rows<FactoredRow>(table);
  const Settings settings = unpack_settings(settings_, grad_factor);
  py::gil_scoped_release release;
  for (const FactoredRow& row : rows) {
    if (elements(row) == 0) {
      if (sizes != 0) address<float>(sizes)[row.index] = 0.0f;
      continue;
    }
    Statistics statistics(row);
    FactoredRow at;
    const float clip = begin_step(kernels, row, settings, threads, statistics, at);
    auto rate = static_cast<float>(settings.lr);
    if (sizes != 0) {
      const float size = root_mean_square(sum_squared_weights(kernels, row, threads), row);
      address<float>(sizes)[row.index] = size;
      const auto least = static_cast<float>(least_size);
      rate *= size < least ? least : size;
    }
    const float decay = 1.0f - static_cast<float>(settings.weight_decay) * rate;
    end_step(kernels, at, settings, settings.beta1, rate / clip, decay, threads);
  }
}

void came_step(int variant, const py::bytes& table, const py::tuple& settings_, int64_t grad_factor, double beta3,
               double residual_eps, int threads) {
  const Kernels& kernels = kernels_at(variant);
  const auto rows = unpack_rows<FactoredRow>(table);
  const Settings settings = unpack_settings(settings_, grad_factor);
  py::gil_scoped_release release;
  for (const FactoredRow& row : rows) {
    if (elements(row) == 0) continue;
    Statistics statistics(row);
    FactoredRow at;
    const float unclipped = 1.0f / begin_step(kernels, row, settings, threads, statistics, at);
    at.index = 0;
    const auto scalars = factored_scalars(settings.inverse_grad_scale, settings.grad_factor, residual_eps,
                                          settings.beta1, 1.0 - settings.beta1,
                                          reinterpret_cast<int64_t>(&unclipped), 0, 0);
    Statistics residuals(row);
    FactoredRow moving = at;
    moving.row_sums = reinterpret_cast<int64_t>(residuals.row_sums());
    moving.col_sums = reinterpret_cast<int64_t>(residuals.col_sums());
    sum_rows_and_columns(kernels.factored.residual_sums, {moving}, scalars, threads);
    if (row.row_factors != 0) {
      residuals.move(residual_averages(row), row, beta3);
    } else {
      residuals.set_factors_to_one();
    }
    residuals.use_in(at);
    at.grad = row.exp_avg;
    at.exp_avg = 0;
    at.kinds = (row.kinds & 0xffff) | static_cast<int64_t>(DType::kFloat32) << 16;
    Settings of_moments = settings;
    of_moments.inverse_grad_scale = 1.0;
    of_moments.grad_factor = 0;
    const auto decay = static_cast<float>(1.0 - settings.lr * settings.weight_decay);
    end_step(kernels, at, of_moments, 0.0, static_cast<float>(settings.lr), decay, threads);
  }
}

}  // namespace

void bind_factored_steps(py::module_& m) {
  m.def("adafactor_step", &adafactor_step);
  m.def("came_step", &came_step);
}

}  // namespace bmt
