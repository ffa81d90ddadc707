// Factored second moments: sums over a tile of a matrix, and the update of a tile.

namespace factored {

using bmt::FactoredRow;
using bmt::FactoredScalars;
using bmt::FactoredTile;
using bmt::address;
using bmt::element;

// One element or a vector of them, so that what is done to them is written once.
struct One {};
template <class T>
BMT_INLINE float read(One, T, const typename T::Storage* p) { return load_one(T(), p); }
template <class T>
BMT_INLINE void write(One, T, typename T::Storage* p, float x) { store_one(T(), p, x); }
BMT_INLINE float all(One, float x) { return x; }
#if BMT_VECTOR
struct Many {};
template <class T>
BMT_INLINE Vec read(Many, T, const typename T::Storage* p) { return load(T(), p); }
template <class T>
BMT_INLINE void write(Many, T, typename T::Storage* p, Vec x) { store(T(), p, x); }
BMT_INLINE Vec all(Many, float x) { return spread(x); }
#endif

// A row of a tile.
template <class Grad>
struct TileRow {
  const typename Grad::Storage* grad;
  float* exp_avg;
  const float* col_factors;
  float scale, eps, beta1, one_minus_beta1;
  float multiplier;  // see row_multiplier
};

// What is summed: a function of element j of the row, and perhaps of its factors.

struct Square {
  static constexpr bool kByFactors = false;
};
template <class Lanes, class Grad>
BMT_INLINE auto term(Square, Lanes lanes, const TileRow<Grad>& row, int64_t j) {
  return bmt::factored_square(read(lanes, Grad(), row.grad + j), all(lanes, row.scale), all(lanes, row.eps));
}

template <class Lanes, class Grad>
BMT_INLINE auto direction(Lanes lanes, const TileRow<Grad>& row, int64_t j) {
  return bmt::factored_direction(read(lanes, Grad(), row.grad + j), all(lanes, row.multiplier),
                                 read(lanes, F32(), row.col_factors + j));
}

struct UpdateSquare {
  static constexpr bool kByFactors = true;
};
template <class Lanes, class Grad>
BMT_INLINE auto term(UpdateSquare, Lanes lanes, const TileRow<Grad>& row, int64_t j) {
  const auto u = direction(lanes, row, j);
  return u * u;
}

struct Residual {
  static constexpr bool kByFactors = true;
};
template <class Lanes, class Grad>
BMT_INLINE auto term(Residual, Lanes lanes, const TileRow<Grad>& row, int64_t j) {
  const auto u = direction(lanes, row, j);
  const auto m = bmt::factored_momentum(read(lanes, F32(), row.exp_avg + j), u, all(lanes, row.beta1),
                                        all(lanes, row.one_minus_beta1));
  write(lanes, F32(), row.exp_avg + j, m);
  return bmt::factored_residual(m, u, all(lanes, row.eps));
}

// Every variant adds in this order: column j of a row goes to lane j % 32, left to right; the lanes are added
// pairwise; a column is added from top to bottom. Hence all have the same bits. Rows are followed one at a time if they
// are not too wide, for the processor fetches ahead what is read in the order of memory; several lanes are several
// additions in flight.
constexpr int kLanes = 32;

BMT_INLINE float sum_of_lanes(float* lanes) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  }
  return lanes[0];
}

// Adds the terms of columns [begin, end) to the row's lanes, and each to its column's sum; `begin` is a multiple of
// kLanes. visit() is called for every kWidth columns.
template <class Term, bool kByColumn, class Grad, class Visit>
BMT_INLINE void add_columns(const TileRow<Grad>& row, int64_t begin, int64_t end, float* __restrict lanes,
                            float* __restrict col_sums, const Visit& visit) {
  int64_t j = begin;
#if BMT_VECTOR
  constexpr int kParts = kLanes / kWidth;
  Vec sums[kParts];
  for (int part = 0; part < kParts; ++part) sums[part] = load_f32(lanes + part * kWidth);
  const auto add = [&](int part, int64_t col) __attribute__((always_inline)) {
    visit();
    const Vec x = term(Term(), Many(), row, col);
    sums[part] = sums[part] + x;
    if (kByColumn) store_f32(col_sums + col, load_f32(col_sums + col) + x);
  };
  for (; j + kLanes <= end; j += kLanes) {
    for (int part = 0; part < kParts; ++part) add(part, j + part * kWidth);
  }
  int left = 0;
  for (; left < kParts && j + kWidth <= end; ++left, j += kWidth) add(left, j);
  for (int part = 0; part < kParts; ++part) store_f32(lanes + part * kWidth, sums[part]);
  const int first = left * kWidth;
#else
  for (; j + kLanes <= end; j += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      const float x = term(Term(), One(), row, j + l);
      lanes[l] += x;
      if (kByColumn) col_sums[j + l] += x;
    }
  }
  const int first = 0;
#endif
  for (int l = first; j < end; ++l, ++j) {
    BMT_SCALAR_LOOP;
    const float x = term(Term(), One(), row, j);
    lanes[l] += x;
    if (kByColumn) col_sums[j] += x;
  }
}

// The sum of the terms of n columns; each is also added to its column's sum.
template <class Term, bool kByColumn, class Grad>
BMT_INLINE float add_row(const TileRow<Grad>& row, int64_t n, float* __restrict col_sums) {
  float lanes[kLanes] = {};
  add_columns<Term, kByColumn>(row, 0, n, lanes, col_sums, [] {});
  return sum_of_lanes(lanes);
}

#if BMT_VECTOR
// A pass that reads and writes sums and factors of columns finds in the first-level cache those of this many columns.
constexpr int64_t kCachedCols = 2048;
// Rows that are wider than that are followed in bands of so many rows, by kBandCols columns at a time.
constexpr int kBandRows = 8;
constexpr int64_t kBandCols = 1280;
static_assert(kBandCols % kLanes == 0, "a column's lane does not depend on where its chunk begins");

// The sums of the terms of `rows` rows, which are added to column by column as if one row came after the other. The
// processor fetches ahead only what is read in the order of memory, so the band that comes next, if one does, is asked
// for in that order.
template <class Term, class Grad>
BMT_INLINE void add_band(const TileRow<Grad>* band, int rows, bool last, int64_t n, int64_t pitch, float* row_sums,
                         float* __restrict col_sums) {
  float lanes[kBandRows][kLanes] = {};
  const auto* grad = band[0].grad + rows * pitch;
  const float* exp_avg = band[0].exp_avg + rows * pitch;
  int64_t fetched = 0;
  const auto fetch = [&]() __attribute__((always_inline)) {
    constexpr int kRead = 0, kSecondLevel = 2;
    __builtin_prefetch(grad + fetched, kRead, kSecondLevel);
    __builtin_prefetch(exp_avg + fetched, kRead, kSecondLevel);
    fetched += kWidth;
    if (fetched >= n) {
      fetched -= n;
      grad += pitch;
      exp_avg += pitch;
    }
  };
  for (int64_t begin = 0; begin < n; begin += kBandCols) {
    const int64_t end = begin + kBandCols < n ? begin + kBandCols : n;
    for (int r = 0; r < rows; ++r) {
      if (last) {
        add_columns<Term, true>(band[r], begin, end, lanes[r], col_sums, [] {});
      } else {
        add_columns<Term, true>(band[r], begin, end, lanes[r], col_sums, fetch);
      }
    }
  }
  for (int r = 0; r < rows; ++r) row_sums[r] = sum_of_lanes(lanes[r]);
}
#endif

template <class Grad>
BMT_INLINE TileRow<Grad> first_row(const FactoredRow& row, const FactoredTile& tile, const FactoredScalars& s) {
  const int64_t first = (tile.batch * row.rows + tile.row) * row.cols + tile.col;
  return {address<const typename Grad::Storage>(row.grad) + first,
          element<float>(row.exp_avg, first),
          element<const float>(row.col_factors, tile.batch * row.cols + tile.col),
          bmt::grad_scale(s),
          s.eps,
          s.beta1,
          s.one_minus_beta1,
          0.0f};
}

BMT_INLINE const float* tile_row_factors(const FactoredRow& row, const FactoredTile& tile) {
  return element<const float>(row.row_factors, tile.batch * row.rows + tile.row);
}

template <class Term, bool kByColumn, class Grad>
BMT_INLINE void add_tile(const FactoredRow& row, const FactoredTile& tile, const FactoredScalars& s, float* row_sums,
                         float* col_sums) {
  TileRow<Grad> at = first_row<Grad>(row, tile, s);
  const float* factors = tile_row_factors(row, tile);
  int64_t i = 0;
#if BMT_VECTOR
  if (kByColumn && Term::kByFactors && tile.cols > kCachedCols) {
    while (i < tile.rows) {
      TileRow<Grad> band[kBandRows];
      const int rows = static_cast<int>(tile.rows - i < kBandRows ? tile.rows - i : kBandRows);
      for (int r = 0; r < rows; ++r) {
        band[r] = at;
        band[r].multiplier = bmt::row_multiplier(s, row, at.scale, factors[i + r]);
        at.grad += row.cols;
        at.exp_avg += row.cols;
      }
      // What follows a tile as wide as the matrix is the next tile.
      const bool last = i + rows == tile.rows && tile.cols < row.cols;
      add_band<Term>(band, rows, last, tile.cols, row.cols, row_sums + i, col_sums);
      i += rows;
    }
  }
#endif
  for (; i < tile.rows; ++i) {
    if (row.row_factors != 0) at.multiplier = bmt::row_multiplier(s, row, at.scale, factors[i]);
    row_sums[i] = add_row<Term, kByColumn>(at, tile.cols, col_sums);
    at.grad += row.cols;
    if (at.exp_avg != nullptr) at.exp_avg += row.cols;
  }
}

template <class Term, class Grad>
static void sums(const FactoredRow& row, const FactoredTile& tile, const FactoredScalars& s, float* row_sums,
                          float* col_sums) {
  for (int64_t j = 0; j < tile.cols; ++j) col_sums[j] = 0.0f;
  add_tile<Term, true, Grad>(row, tile, s, row_sums, col_sums);
}

template <class Grad>
static double update_square_sum(const FactoredRow& row, const FactoredTile& tile, const FactoredScalars& s) {
  float row_sums[bmt::kFactoredTileRows];
  add_tile<UpdateSquare, false, Grad>(row, tile, s, row_sums, nullptr);
  double sum = 0.0;
  for (int64_t i = 0; i < tile.rows; ++i) sum += static_cast<double>(row_sums[i]);
  return sum;
}

template <class Weight, class Copy, class Grad, bool kMomentum, class Lanes>
BMT_INLINE void update_elements(Lanes lanes, const TileRow<Grad>& row, typename Weight::Storage* __restrict weight,
                                typename Copy::Storage* __restrict copy, float decay, int64_t j) {
  auto change = direction(lanes, row, j);
  if (kMomentum) {
    float* __restrict exp_avg = row.exp_avg + j;
    change = bmt::factored_momentum(read(lanes, F32(), exp_avg), change, all(lanes, row.beta1),
                                    all(lanes, row.one_minus_beta1));
    write(lanes, F32(), exp_avg, change);
  }
  const auto w = read(lanes, Weight(), weight + j) * all(lanes, decay) - change;
  write(lanes, Weight(), weight + j, w);
  write(lanes, Copy(), copy + j, w);
}

template <class Weight, class Copy, class Grad, bool kMomentum>
BMT_INLINE void update_tile(const FactoredRow& row, const FactoredTile& tile, const FactoredScalars& s) {
  TileRow<Grad> at = first_row<Grad>(row, tile, s);
  const float* factors = tile_row_factors(row, tile);
  const float decay = bmt::decay_factor(s, row);
  const int64_t first = (tile.batch * row.rows + tile.row) * row.cols + tile.col;
  auto* weight = address<typename Weight::Storage>(row.weight) + first;
  auto* copy = address<typename Copy::Storage>(copy_or_weight(row)) + first;
  for (int64_t i = 0; i < tile.rows; ++i) {
    at.multiplier = bmt::row_multiplier(s, row, at.scale, factors[i]);
    int64_t j = 0;
#if BMT_VECTOR
    for (; j + kWidth <= tile.cols; j += kWidth) {
      update_elements<Weight, Copy, Grad, kMomentum>(Many(), at, weight, copy, decay, j);
    }
#endif
    for (; j < tile.cols; ++j) {
      BMT_REMAINDER;
      update_elements<Weight, Copy, Grad, kMomentum>(One(), at, weight, copy, decay, j);
    }
    at.grad += row.cols;
    if (kMomentum) at.exp_avg += row.cols;
    weight += row.cols;
    copy += row.cols;
  }
}

template <class Weight, class Copy, class Grad>
static void update(const FactoredRow& row, const FactoredTile& tile, const FactoredScalars& s) {
  if (row.exp_avg != 0) {
    update_tile<Weight, Copy, Grad, true>(row, tile, s);
  } else {
    update_tile<Weight, Copy, Grad, false>(row, tile, s);
  }
}

}  // namespace factored

#define BMT_FACTORED_SUMS(term) \
  {factored::sums<term, F32>, factored::sums<term, BF16>, factored::sums<term, F16>}
#define BMT_FACTORED_UPDATE(weight, copy) \
  {factored::update<weight, copy, F32>, factored::update<weight, copy, BF16>, factored::update<weight, copy, F16>}
#define BMT_FACTORED_KERNELS                                                                                  \
  {                                                                                                           \
    BMT_FACTORED_SUMS(factored::Square), BMT_FACTORED_SUMS(factored::Residual),                               \
        {factored::update_square_sum<F32>, factored::update_square_sum<BF16>, factored::update_square_sum<F16>}, { \
      BMT_FACTORED_UPDATE(F32, NoCopy), BMT_FACTORED_UPDATE(BF16, NoCopy), BMT_FACTORED_UPDATE(F16, NoCopy),  \
          BMT_FACTORED_UPDATE(F32, BF16), BMT_FACTORED_UPDATE(F32, F16)                                       \
    }                                                                                                         \
  }
