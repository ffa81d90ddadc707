// Splitting the elements of many rows over threads.
#pragma once

#include <algorithm>
#include <cstdint>

namespace bmt {

// Below this many elements per thread, waking another thread costs more than it saves.
constexpr int64_t kGrain = 32768;

template <class Row>
int64_t total_elements(const Row* rows, int64_t count) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += rows[i].numel;
  return total;
}

inline int useful_threads(int64_t total, int threads) {
  return static_cast<int>(std::clamp<int64_t>(total / kGrain, 1, std::max(threads, 1)));
}

// All rows, end to end, are split into `parts` ranges of nearly equal length; visit(row, begin, end) is called for the
// elements of each row that are in range `part`. Ranges begin at multiples of kUnit elements within a row; with 64, no
// two threads write to one cache line of an aligned tensor. A row is split only where a range ends, so every thread
// streams through long contiguous stretches.
template <int64_t kUnit = 64, class Row, class Visit>
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
      return (position - start) / kUnit * kUnit;
    };
    const int64_t begin = within(first);
    const int64_t end = within(last);
    if (begin < end) visit(rows[i], begin, end);
    start += numel;
  }
}

// Sums over many elements are made per block of a row and then over the blocks in order, so that they do not depend
// on the number of threads.
constexpr int64_t kBlock = 16384;

inline int64_t blocks_of(int64_t numel) { return (numel + kBlock - 1) / kBlock; }

template <class Row>
int64_t total_blocks(const Row* rows, int64_t count) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += blocks_of(rows[i].numel);
  return total;
}

// Calls visit(row, begin, end, block) for the blocks of all rows that are in range `part`; `block` counts through
// all rows.
template <class Row, class Visit>
void visit_blocks(const Row* rows, int64_t count, int64_t blocks, int part, int parts, Visit visit) {
  const int64_t first = blocks * part / parts;
  const int64_t last = blocks * (part + 1) / parts;
  int64_t start = 0;
  for (int64_t i = 0; i < count && start < last; ++i) {
    const int64_t here = blocks_of(rows[i].numel);
    for (int64_t block = std::max(first, start); block < std::min(last, start + here); ++block) {
      const int64_t begin = (block - start) * kBlock;
      visit(rows[i], begin, std::min(begin + kBlock, rows[i].numel), block);
    }
    start += here;
  }
}

// Arrays that are only written are stored past the caches, so that their lines are not read first, where a call
// moves more bytes than this: its arrays push each other out of the caches anyway.
constexpr int64_t kStreamFromBytes = int64_t{32} << 20;

}  // namespace bmt
