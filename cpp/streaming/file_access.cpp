#include "file_access.h"

#ifndef _WIN32

#include <cerrno>
#include <climits>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

// MIXEDKV_PLAIN_POSIX: as on a system that is neither, for tests
#if defined(__linux__) && !defined(MIXEDKV_PLAIN_POSIX)
#define ON_LINUX
#elif defined(__APPLE__) && !defined(MIXEDKV_PLAIN_POSIX)
#define ON_MACOS
#endif

namespace mixedkv {

#if defined(ON_LINUX)

static std::string link_of(int fd) {
    return "/proc/self/fd/" + std::to_string(fd);
}

std::string name_of(int fd) {
    char          name[PATH_MAX];
    const ssize_t n = readlink(link_of(fd).c_str(), name, sizeof(name));
    return n > 0 ? std::string(name, n) : "the model's file";
}

system_file open_again(int fd, bool direct) {
    return open(link_of(fd).c_str(), O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0));
}

#else

std::string name_of([[maybe_unused]] int fd) {
#ifdef ON_MACOS
    char name[PATH_MAX];
    if (fcntl(fd, F_GETPATH, name) == 0) {
        return name;
    }
#endif
    return "the model's file";
}

system_file open_again(int fd, bool direct) {
    if (!direct) {
        return fcntl(fd, F_DUPFD_CLOEXEC, 0); // pread has no use for the position, which they share
    }
    int res = -1;
#ifdef ON_MACOS
    res             = open(name_of(fd).c_str(), O_RDONLY | O_CLOEXEC);
    struct stat one = {}, other = {};
    const bool  same = res >= 0 && fstat(res, &one) == 0 && fstat(fd, &other) == 0 && one.st_dev == other.st_dev &&
                       one.st_ino == other.st_ino; // another may have its name by now
    if (res >= 0 && !(same && fcntl(res, F_NOCACHE, 1) == 0)) {
        close(res);
        res = -1;
    }
#endif
    return res;
}

#endif

void close_file(system_file file) {
    close(int(file));
}

bool get_status(system_file file, file_status & status) {
    struct stat found = {};
    if (fstat(int(file), &found) != 0) {
        return false;
    }
#ifdef __APPLE__
    const timespec & changed = found.st_mtimespec;
#else
    const timespec & changed = found.st_mtim;
#endif
    status = { uint64_t(found.st_size), int64_t(changed.tv_sec) * 1'000'000'000 + changed.tv_nsec };
    return true;
}

int64_t read_at(system_file file, void * to, uint64_t size, uint64_t offset) {
    ssize_t n;
    do {
        n = pread(int(file), to, size, off_t(offset));
    } while (n < 0 && errno == EINTR);
    return n;
}

void * map_file(system_file file, uint64_t size) {
    void * const at = mmap(nullptr, size, PROT_READ, MAP_SHARED, int(file), 0);
    if (at == MAP_FAILED) {
        return nullptr;
    }
    madvise(at, size, MADV_RANDOM);
    return at;
}

void unmap_file(void * mapped, uint64_t size) {
    munmap(mapped, size);
}

void forget([[maybe_unused]] system_file file, [[maybe_unused]] uint64_t offset, [[maybe_unused]] uint64_t size) {
#ifdef ON_LINUX
    posix_fadvise(int(file), off_t(offset), off_t(size), POSIX_FADV_DONTNEED);
#endif
}

// the pages that hold these bytes
static int advise(void * mapped, size_t size, int what) {
    const uintptr_t page  = sysconf(_SC_PAGESIZE);
    const uintptr_t begin = reinterpret_cast<uintptr_t>(mapped) / page * page;
    return madvise(reinterpret_cast<void *>(begin), reinterpret_cast<uintptr_t>(mapped) + size - begin, what) == 0
               ? 0
               : errno;
}

void forget(void * mapped, size_t size) {
    advise(mapped, size, MADV_DONTNEED);
}

int fetch(void * mapped, size_t size) {
    advise(mapped, size, MADV_WILLNEED);
#if defined(ON_LINUX) && defined(MADV_POPULATE_READ)
    // waits, and tells what a look at the pages would end the process for
    const int problem = advise(mapped, size, MADV_POPULATE_READ);
    return problem == EINVAL ? 0 : problem == EFAULT ? EIO : problem; // EINVAL: before Linux 5.14
#else
    return 0;
#endif
}

void * allocate_pages(size_t size, [[maybe_unused]] bool is_sparse) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
    flags |= is_sparse ? MAP_NORESERVE : 0;
#endif
    void * const at = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    return at == MAP_FAILED ? nullptr : at;
}

void free_pages(void * memory, size_t size) {
    munmap(memory, size);
}

void use_large_pages([[maybe_unused]] void * memory, [[maybe_unused]] size_t size) {
#ifdef ON_LINUX
    madvise(memory, size, MADV_HUGEPAGE);
#endif
}

int lock_pages(void * memory, size_t size) {
    return mlock(memory, size) == 0 ? 0 : errno;
}

size_t give_back_pages([[maybe_unused]] void * memory, [[maybe_unused]] size_t size) {
#ifdef ON_LINUX // elsewhere pages that are not needed stay, with what is in them
    const uintptr_t page  = sysconf(_SC_PAGESIZE);
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
    const uintptr_t end   = (reinterpret_cast<uintptr_t>(memory) + size) / page * page;
    if (begin < end && madvise(reinterpret_cast<void *>(begin), end - begin, MADV_DONTNEED) == 0) {
        return end - begin;
    }
#endif
    return 0;
}

} // namespace mixedkv

#endif
