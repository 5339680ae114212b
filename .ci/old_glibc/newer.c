// What g++ 12 and its libstdc++.a, built on Debian 12, take from glibc 2.29 to 2.36, for wheels that run on 2.28. Linked into
// each library that needs one of these; the linker hides it there (--exclude-libs).
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <spawn.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// Before 2.33 these were inline functions over the first three. 64-bit platforms have one layout, whose number this is.
#ifdef __x86_64__
enum { STAT_VERSION = 1 };
#else
enum { STAT_VERSION = 0 };
#endif
int __xstat(int version, const char * path, struct stat * status);
int __lxstat(int version, const char * path, struct stat * status);
int __fxstat(int version, int file, struct stat * status);

int stat(const char * path, struct stat * status) { return __xstat(STAT_VERSION, path, status); }
int lstat(const char * path, struct stat * status) { return __lxstat(STAT_VERSION, path, status); }
int fstat(int file, struct stat * status) { return __fxstat(STAT_VERSION, file, status); }
int fstat64(int file, struct stat64 * status) { return __fxstat(STAT_VERSION, file, (struct stat *) status); }

// 2.32. std::shared_ptr counts without atomic instructions where this is true.
char __libc_single_threaded = 0;

// 2.29. llama.cpp does the same where glibc has none of these two.
int getcpu(unsigned * cpu, unsigned * node) { return (int) syscall(SYS_getcpu, cpu, node, NULL); }
int posix_spawn_file_actions_addchdir_np(posix_spawn_file_actions_t * actions, const char * path) {
    (void) actions;
    (void) path;
    return ENOSYS;
}

// 2.36, for std::random_device.
uint32_t arc4random(void) {
    uint32_t value;
    if (getrandom(&value, sizeof value, 0) != sizeof value) {
        abort(); // neither interrupted nor short up to 256 bytes: getrandom(2)
    }
    return value;
}

// 2.30, for std::condition_variable::wait_for. It waits on the wall clock, as libstdc++ did before; who waits looks at its own clock after.
int pthread_cond_clockwait(pthread_cond_t * condition, pthread_mutex_t * mutex, clockid_t clock, const struct timespec * until) {
    struct timespec now, then;
    if (clock_gettime(clock, &now) != 0 || clock_gettime(CLOCK_REALTIME, &then) != 0) {
        return EINVAL;
    }
    int64_t left = (int64_t) (until->tv_sec - now.tv_sec) * 1000000000 + (until->tv_nsec - now.tv_nsec);
    if (left < 0) {
        left = 0;
    }
    left += then.tv_nsec;
    then.tv_sec += left / 1000000000;
    then.tv_nsec = left % 1000000000;
    return pthread_cond_timedwait(condition, mutex, &then);
}
