// The OpenMP team that PyTorch keeps warm is borrowed by looking its entry points up at run time: linking an
// OpenMP runtime of our own would put a second one, with a second team of threads, into the process.
#include "cpu/parallel.h"

#include <thread>
#include <vector>

#if !defined(_WIN32)
#include <dlfcn.h>
#endif

namespace bmt {
namespace {

struct OpenMP {
  void (*parallel)(void (*body)(void*), void* context, unsigned threads, unsigned flags) = nullptr;
  int (*thread_num)() = nullptr;
  int (*num_threads)() = nullptr;

  OpenMP() {
#if !defined(_WIN32)
    // libgomp, and LLVM's and Intel's runtimes on Linux, all export these.
    parallel = reinterpret_cast<decltype(parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    thread_num = reinterpret_cast<decltype(thread_num)>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
    num_threads = reinterpret_cast<decltype(num_threads)>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"));
#endif
  }

  bool found() const { return parallel && thread_num && num_threads; }
};

// Looked up on the first call, when PyTorch has long been loaded: its tensors are the arguments.
const OpenMP& openmp() {
  static const OpenMP runtime;
  return runtime;
}

struct Job {
  void (*body)(void*, int, int);
  void* context;
};

void openmp_body(void* pointer) {
  const Job& job = *static_cast<const Job*>(pointer);
  // The runtime may grant fewer threads than were asked for.
  job.body(job.context, openmp().thread_num(), openmp().num_threads());
}

}  // namespace

void run_parts(int threads, void (*body)(void*, int, int), void* context) {
  if (threads <= 1) {
    body(context, 0, 1);
    return;
  }
  if (openmp().found()) {
    Job job{body, context};
    openmp().parallel(openmp_body, &job, static_cast<unsigned>(threads), 0);
    return;
  }
  std::vector<std::thread> helpers;
  helpers.reserve(static_cast<size_t>(threads) - 1);
  int started = 1;
  try {
    for (; started < threads; ++started) helpers.emplace_back(body, context, started, threads);
  } catch (...) {
    // No more threads can be started: this one does the remaining parts.
  }
  body(context, 0, threads);
  for (int part = started; part < threads; ++part) body(context, part, threads);
  for (auto& helper : helpers) helper.join();
}

const char* threading_name() { return openmp().found() ? "openmp" : "std::thread"; }

}  // namespace bmt
