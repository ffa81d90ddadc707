// Running one function on several threads.
#pragma once

namespace bmt {

// Calls body(context, part, parts) for each part in [0, parts), in parallel, with parts <= threads, and
// returns when all have returned. body must not throw.
void run_parts(int threads, void (*body)(void* context, int part, int parts), void* context);

// "openmp" if the process has an OpenMP runtime whose thread team is borrowed, else "std::thread".
const char* threading_name();

}  // namespace bmt
