// The threads of the kernels: a loop over tasks, shared out as threads come.
//
// Made for a machine whose cores others want too. Tasks are claimed one run at a time, so a thread that the
// system has taken off its core delays only what it has claimed; a thread that never came is not waited for.
// Whoever waits spins for a moment, which covers the gap between two kernels of a step, then sleeps.
#pragma once

#include <stdint.h>

namespace sapwood {

using Task = void (*)(const void *context, int64_t index);

// Sets how many threads, the caller's included, later loops use. Not while a loop runs.
void set_threads(int threads);

// Calls task(context, i) for each i from 0 to count - 1, in runs of `run`, on up to `threads` threads;
// returns when all are done. From a second thread at the same time, or from within a task, it runs alone.
void run_tasks(int threads, int64_t count, int64_t run, Task task, const void *context);

// A run length that leaves a few runs for each thread: for tasks that are all alike.
static inline int64_t fair_run(int64_t count, int threads) { return count / (4 * threads) + 1; }

// body(i) for each i from 0 to count - 1.
template <class Body>
static inline void share(int threads, int64_t count, int64_t run, const Body &body) {
    if (threads <= 1 || count <= run) {
        for (int64_t i = 0; i < count; i++) body(i);
        return;
    }
    run_tasks(
        threads, count, run, [](const void *context, int64_t i) { (*(const Body *)context)(i); }, &body);
}

}  // namespace sapwood
