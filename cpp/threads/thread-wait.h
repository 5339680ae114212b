// How the CPU threads of a context wait at a barrier: awake for a moment, since the others mostly are about to come,
// then asleep, since another may need this very core. A thread that only yields gives its time slices away and gets
// none back.

#pragma once

#if defined(__linux__)
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Looks before a thread falls asleep, with a pause of the CPU after each: at most some 3 milliseconds, since to
// wake costs a token more than it saves where nobody else wants the core. Fewer where the others did not come in time
// the last times, as on a core that two of them share. FEW where there are more threads than cores, as a pool that does
// not poll says: who looks then has the core that the awaited one needs.
enum { THREAD_WAIT_MOST = 65536, THREAD_WAIT_FEW = 64, THREAD_WAIT_LEAST = 16 };

// Returns when *value is no longer `old`, or before that for no reason. The threads asleep are counted in *n_asleep.
static inline void thread_wait_asleep(atomic_int * n_asleep, atomic_int * value, int old) {
#if defined(__linux__)
    atomic_fetch_add_explicit(n_asleep, 1, memory_order_seq_cst); // before the kernel compares
    syscall(SYS_futex, value, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
    atomic_fetch_sub_explicit(n_asleep, 1, memory_order_seq_cst);
#else
    (void)n_asleep;
    (void)value;
    (void)old;
    sched_yield();
#endif
}

// Returns when *value is no longer `old`.
static inline void thread_wait(atomic_int * n_asleep, atomic_int * value, int old, int most) {
    static _Thread_local int looks = THREAD_WAIT_MOST;

    looks = looks < most ? looks : most;
    for (int i = 0; i < looks; i++) {
        if (atomic_load_explicit(value, memory_order_relaxed) != old) {
            looks = looks < most ? looks * 2 : looks;
            return;
        }
        ggml_thread_cpu_relax();
    }

    looks = looks > THREAD_WAIT_LEAST ? looks / 2 : looks;
    while (atomic_load_explicit(value, memory_order_relaxed) == old) {
        thread_wait_asleep(n_asleep, value, old);
    }
}

// After *value was changed.
static inline void thread_wait_wake(atomic_int * n_asleep, atomic_int * value) {
#if defined(__linux__)
    if (atomic_load_explicit(n_asleep, memory_order_seq_cst) > 0) {
        syscall(SYS_futex, value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
    }
#else
    (void)n_asleep;
    (void)value;
#endif
}
