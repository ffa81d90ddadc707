#include "cpu/run.h"

#include <algorithm>
#include <atomic>

#include "cpu/parallel.h"

namespace bmt {
namespace {

// Below this many elements per thread, waking another thread costs more than it saves.
constexpr int64_t kGrain = 32768;

template <class Row>
int64_t total_elements(const Row* rows, int64_t count) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += rows[i].numel;
  return total;
}

int useful_threads(int64_t total, int threads) {
  return static_cast<int>(std::clamp<int64_t>(total / kGrain, 1, std::max(threads, 1)));
}

// All rows laid end to end are cut into `parts` nearly equal pieces; visit(row, begin, end) is called for what
// lies in piece `part` of each row. Cuts fall on multiples of 64 elements within a row, so that no two threads
// write to one cache line of an aligned tensor. A row is cut at most where a piece ends, so every thread
// streams through long contiguous stretches.
template <class Row, class Visit>
void visit_part(const Row* rows, int64_t count, int64_t total, int part, int parts, Visit visit) {
  const auto cut = [&](int p) { return static_cast<int64_t>(static_cast<double>(total) * p / parts); };
  const int64_t first = cut(part);
  const int64_t last = part + 1 == parts ? total : cut(part + 1);
  int64_t start = 0;
  for (int64_t i = 0; i < count && start < last; ++i) {
    const int64_t numel = rows[i].numel;
    const auto within = [&](int64_t position) {
      if (position <= start) return int64_t{0};
      if (position >= start + numel) return numel;
      return (position - start) / 64 * 64;
    };
    const int64_t begin = within(first);
    const int64_t end = within(last);
    if (begin < end) visit(rows[i], begin, end);
    start += numel;
  }
}

}  // namespace

void adam_rows(const Kernels& kernels, const AdamRow* rows, int64_t count, const AdamScalars& scalars, int threads) {
  struct Context {
    const Kernels& kernels;
    const AdamRow* rows;
    int64_t count;
    int64_t total;
    const AdamScalars& scalars;
  } context{kernels, rows, count, total_elements(rows, count), scalars};
  run_parts(
      useful_threads(context.total, threads),
      [](void* pointer, int part, int parts) {
        const Context& c = *static_cast<const Context*>(pointer);
        visit_part(c.rows, c.count, c.total, part, parts, [&](const AdamRow& row, int64_t begin, int64_t end) {
          c.kernels.adam[weight_kind(row)][grad_kind(row)](row, begin, end, c.scalars);
        });
      },
      &context);
}

bool any_nonfinite(const Kernels& kernels, const DataRow* rows, int64_t count, int threads) {
  struct Context {
    const Kernels& kernels;
    const DataRow* rows;
    int64_t count;
    int64_t total;
    std::atomic<bool> found;
  } context{kernels, rows, count, total_elements(rows, count), {false}};
  run_parts(
      useful_threads(context.total, threads),
      [](void* pointer, int part, int parts) {
        Context& c = *static_cast<Context*>(pointer);
        visit_part(c.rows, c.count, c.total, part, parts, [&](const DataRow& row, int64_t begin, int64_t end) {
          if (c.found.load(std::memory_order_relaxed)) return;
          const int64_t itemsize = static_cast<DType>(row.dtype) == DType::kFloat32 ? 4 : 2;
          const auto* data = reinterpret_cast<const char*>(static_cast<uintptr_t>(row.data)) + begin * itemsize;
          if (c.kernels.has_nonfinite[row.dtype](data, end - begin)) c.found.store(true, std::memory_order_relaxed);
        });
      },
      &context);
  return context.found.load();
}

}  // namespace bmt
