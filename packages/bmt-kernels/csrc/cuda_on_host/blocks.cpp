#include "blocks.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <system_error>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

extern "C" {
__attribute__((visibility("hidden"))) extern uint64_t cuda_shared_memory_begin[];
__attribute__((visibility("hidden"))) extern uint64_t cuda_shared_memory_end[];
}

namespace cuda_on_host {

Here here;

namespace {

constexpr unsigned kWarp = 32;
constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kGuardBytes = 4096;

enum class State { kReady, kInWarp, kInBlock, kEnded };

using Place = void* [5];  // as __builtin_setjmp keeps it

struct Fibre {
  ucontext_t beginning;
  bool begun;
  Place place;
  char* stack;
  State state;
  Site site;  // where it waits
  unsigned mask;
  uint64_t value;
  uint64_t values[kWarp];
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack;
#endif
};

// Unlike swapcontext, these builtins make no system call, of which there would be millions.
__attribute__((noinline, noreturn, no_sanitize("address"))) void go_on(Place& place) { __builtin_longjmp(place, 1); }
__attribute__((noinline, no_sanitize("address"))) void jump(Place& from, Place& to) {
  if (__builtin_setjmp(from) == 0) go_on(to);
}
__attribute__((noinline, no_sanitize("address"))) void begin(Place& from, const ucontext_t& to) {
  if (__builtin_setjmp(from) == 0) setcontext(&to);
}

class Launch {
 public:
  Launch(unsigned blocks, unsigned threads, const std::function<void()>& thread, std::mt19937_64& order)
      : blocks_(blocks), threads_(threads), thread_(thread), order_(order), turns_(threads) {}

  // Empty, or what went wrong.
  std::string run() {
    std::vector<unsigned> blocks(blocks_);
    std::iota(blocks.begin(), blocks.end(), 0u);
    std::shuffle(blocks.begin(), blocks.end(), order_);
    for (const unsigned block : blocks) {
      here.block.x = block;
      run_block();
      if (!error_.empty()) break;
    }
    return error_;
  }

  void sync_block(Site site) {
    Fibre& me = self();
    me.state = State::kInBlock;
    me.site = site;
    leave();
  }

  const uint64_t* exchange_in_warp(unsigned mask, uint64_t value, Site site) {
    Fibre& me = self();
    if (!(mask >> here.thread.x % kWarp & 1)) fail("a lane calls an operation of which the mask does not name it", site);
    me.state = State::kInWarp;
    me.site = site;
    me.mask = mask;
    me.value = value;
    release_warp(here.thread.x / kWarp * kWarp, mask, site);
    leave();
    return me.values;
  }

  [[noreturn]] void fail(const std::string& what, Site site) {
    report(what, here.thread.x, site);
    for (;;) leave();  // this fibre is never resumed
  }

 private:
  // Fibres and their stacks are kept from launch to launch.
  static std::vector<std::unique_ptr<Fibre>>& fibres() {
    static std::vector<std::unique_ptr<Fibre>> all;
    return all;
  }
  static Fibre& fibre(unsigned thread) { return *fibres()[thread]; }
  static Fibre& self() { return fibre(here.thread.x); }

  static void entry() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &current_->stack_, &current_->stack_bytes_);
#endif
    for (;;) {  // a turn for each block
      current_->thread_();
      self().state = State::kEnded;
      current_->leave();
    }
  }

  void prepare(unsigned thread) {
    auto& all = fibres();
    if (all.size() == thread) {
      all.push_back(std::make_unique<Fibre>());
      void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) {
        throw std::system_error(errno, std::generic_category(), "memory for the stack of a fibre");
      }
      all.back()->stack = static_cast<char*>(memory) + kGuardBytes;
    }
    Fibre& fibre = *all[thread];
    if (fibre.begun && fibre.state == State::kEnded) return;  // and waits for its next turn
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(fibre.stack, kStackBytes - kGuardBytes);  // a launch that failed has left it
    fibre.fake_stack = nullptr;
#endif
    fibre.begun = false;
    getcontext(&fibre.beginning);
    fibre.beginning.uc_stack.ss_sp = fibre.stack;
    fibre.beginning.uc_stack.ss_size = kStackBytes - kGuardBytes;
    makecontext(&fibre.beginning, entry, 0);
  }

  // Of the fibres that can run, the one whose turn comes first always does. Some warps and lanes so get as far ahead of
  // the others as the kernel lets them.
  void run_block() {
    fill_shared_memory();
    std::vector<unsigned> places(threads_);
    std::iota(places.begin(), places.end(), 0u);
    std::shuffle(places.begin(), places.end(), order_);
    turn_of_ = places;
    for (unsigned thread = 0; thread < threads_; ++thread) turns_[places[thread]] = thread;
    ready_.assign(threads_, true);
    first_ready_ = 0;
    for (unsigned thread = 0; thread < threads_; ++thread) {
      prepare(thread);
      fibre(thread).state = State::kReady;
    }
    unsigned ended = 0;
    while (error_.empty() && ended < threads_) {
      while (first_ready_ < threads_ && !ready_[first_ready_]) ++first_ready_;
      if (first_ready_ == threads_) {
        release_block(ended);
        continue;
      }
      ready_[first_ready_] = false;
      here.thread.x = turns_[first_ready_];
      resume(self());
      if (self().state == State::kEnded) ++ended;
    }
  }

  void resume(Fibre& fibre) {
    current_ = this;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&fake_stack_, fibre.stack, kStackBytes - kGuardBytes);
#endif
    if (fibre.begun) {
      jump(scheduler_, fibre.place);
    } else {
      fibre.begun = true;
      begin(scheduler_, fibre.beginning);
    }
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
  }

  void leave() {
    Fibre& me = self();
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&me.fake_stack, stack_, stack_bytes_);
#endif
    jump(me.place, scheduler_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(me.fake_stack, &current_->stack_, &current_->stack_bytes_);
#endif
  }

  void release(unsigned thread) {
    fibre(thread).state = State::kReady;
    ready_[turn_of_[thread]] = true;
    first_ready_ = std::min(first_ready_, turn_of_[thread]);
  }

  // If all lanes of the mask have come.
  void release_warp(unsigned first, unsigned mask, Site site) {
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if (!(mask >> lane & 1)) continue;
      if (first + lane >= threads_) fail("the mask names lanes that the block does not have", site);
      const Fibre& other = fibre(first + lane);
      if (other.state == State::kEnded) fail("the mask names a lane that has ended", site);
      if (other.state != State::kInWarp) return;
      if (other.mask != mask || !same(other.site, site)) fail("lanes of a warp are at different operations", site);
    }
    uint64_t values[kWarp] = {};
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if (mask >> lane & 1) values[lane] = fibre(first + lane).value;
    }
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if (!(mask >> lane & 1)) continue;
      std::copy(values, values + kWarp, fibre(first + lane).values);
      release(first + lane);
    }
  }

  // No fibre can run: all should be at one barrier.
  void release_block(unsigned ended) {
    for (unsigned thread = 0; thread < threads_; ++thread) {
      const Fibre& fibre = Launch::fibre(thread);
      if (fibre.state == State::kEnded) continue;
      if (fibre.state == State::kInWarp) return report("a lane waits for others of its warp", thread, fibre.site);
      if (ended != 0) return report("a thread waits at __syncthreads, and others have ended", thread, fibre.site);
      if (!same(fibre.site, Launch::fibre(0).site)) {
        return report("threads wait at different __syncthreads", thread, fibre.site);
      }
    }
    for (unsigned thread = 0; thread < threads_; ++thread) release(thread);
  }

  static bool same(Site a, Site b) { return a.line == b.line && std::strcmp(a.file, b.file) == 0; }

  void report(const std::string& what, unsigned thread, Site site) {
    error_ = what + " (" + site.file + ":" + std::to_string(site.line) + ", block " + std::to_string(here.block.x) +
             ", thread " + std::to_string(thread) + ")";
  }

  // With NaN and the largest index. What the address sanitizer keeps between the variables is filled, too.
#if defined(__SANITIZE_ADDRESS__)
  __attribute__((no_sanitize_address))
#endif
  static void fill_shared_memory() {
    for (uint64_t* p = cuda_shared_memory_begin; p != cuda_shared_memory_end; ++p) *p = ~uint64_t{0};
  }

  static Launch* current_;

  const unsigned blocks_, threads_;
  const std::function<void()>& thread_;
  std::mt19937_64& order_;
  std::string error_;
  Place scheduler_;
  // A permutation of the threads; the places of threads in it; by place, whether that thread can run.
  std::vector<unsigned> turns_, turn_of_;
  std::vector<bool> ready_;
  unsigned first_ready_ = 0;  // no place before it is of a thread that can run
#if defined(__SANITIZE_ADDRESS__)
  const void* stack_ = nullptr;  // of whoever has launched
  size_t stack_bytes_ = 0;
  void* fake_stack_ = nullptr;
#endif

  friend bool cuda_on_host::run_grid(unsigned, unsigned, const std::function<void()>&);
  friend void cuda_on_host::sync_block(Site);
  friend const uint64_t* cuda_on_host::exchange_in_warp(unsigned, uint64_t, Site);
  friend void cuda_on_host::fail(const char*, Site);
};

Launch* Launch::current_;

std::mutex one_at_a_time;
std::string failure;

}  // namespace

bool run_grid(unsigned blocks, unsigned threads, const std::function<void()>& thread) {
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  static std::string seed;
  static std::mt19937_64 order;
  const char* wanted = std::getenv("BMT_CUDA_ON_HOST_ORDER");
  if (wanted != nullptr && seed != wanted) {
    seed = wanted;
    std::seed_seq sequence(seed.begin(), seed.end());
    order.seed(sequence);
  }
  failure = Launch(blocks, threads, thread, order).run();
  return failure.empty();
}

const char* what_failed() { return failure.c_str(); }

void sync_block(Site site) { Launch::current_->sync_block(site); }

const uint64_t* exchange_in_warp(unsigned mask, uint64_t value, Site site) {
  return Launch::current_->exchange_in_warp(mask, value, site);
}

void fail(const char* what, Site site) { Launch::current_->fail(what, site); }

}  // namespace cuda_on_host
