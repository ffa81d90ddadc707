// CUDA's threads on one thread of the host. A launch runs its blocks one after the other, in a random order. The threads
// of a block are fibres: one runs until it ends or waits for others of its warp or its block. Which of those that could
// run does so first is random, too, so that a kernel that forgets to wait reads what has not been written yet.
//
// The environment variable BMT_CUDA_ON_HOST_ORDER, any text, determines the orders.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>

namespace cuda_on_host {

struct Index {
  unsigned x;
};

// The thread that runs.
struct Here {
  Index thread, block;
};
extern Here here;

struct Site {
  const char* file;
  int line;
};

// Calls `thread` for each thread of each block. False: the launch went wrong as what_failed() says.
bool run_grid(unsigned blocks, unsigned threads, const std::function<void()>& thread);
const char* what_failed();

// Returns when all threads of the block have called it at this site. It is an error if some have ended, or wait elsewhere.
void sync_block(Site site);

// Returns the values of all lanes in `mask`, once these have called it at this site with the same mask. It is an error if
// one of them has ended.
const uint64_t* exchange_in_warp(unsigned mask, uint64_t value, Site site);

// Ends the launch with an error. Does not return.
[[noreturn]] void fail(const char* what, Site site);

template <class T>
struct OfLanes {
  const uint64_t* bits;

  T at(unsigned lane, unsigned mask, Site site) const {
    if (!(mask >> lane & 1)) fail("a lane reads the value of another that the mask does not name", site);
    T value;
    std::memcpy(&value, bits + lane, sizeof value);
    return value;
  }
};

}  // namespace cuda_on_host
