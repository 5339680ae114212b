// What systems do differently with files and pages; the rest of this folder is the same on all. file_access.cpp is for
// POSIX, file_access_windows.cpp for Windows. Where a system has no way of its own, reading goes through the page
// cache: slower, and the same bytes. What fails leaves errno.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace mixedkv {

// an open file, as the system's calls take it: a descriptor, or a HANDLE of Windows
using system_file = intptr_t;

constexpr system_file NO_FILE = -1;

struct file_status {
    uint64_t size    = 0;
    int64_t  changed = 0; // differs after another change
};

// of an open file
std::string name_of(int fd);

// The file behind a descriptor again, past the page cache or through it; NO_FILE where that cannot be.
system_file open_again(int fd, bool direct);
void        close_file(system_file file);

bool    get_status(system_file file, file_status & status);
// As pread: bytes that were read, 0 at the file's end, -1
int64_t read_at(system_file file, void * to, uint64_t size, uint64_t offset);

// The whole file, where nothing is read ahead but by fetch(); null where that cannot be.
void * map_file(system_file file, uint64_t size);
void   unmap_file(void * mapped, uint64_t size);

// The system need not keep these pages of the file, or of a map of it.
void forget(system_file file, uint64_t offset, uint64_t size);
void forget(void * mapped, size_t size);

// These pages of a mapped file are there when this returns, or will be soon; 0 or errno.
int fetch(void * mapped, size_t size);

// Zeros, which take memory once they are written to; null where there are no more. On Windows they count against the
// system's commit limit at once.
// is_sparse: most of them are never written to, and on Linux they are not reserved.
void * allocate_pages(size_t size, bool is_sparse);
void   free_pages(void * memory, size_t size);

// Memory that is used all at once.
void use_large_pages(void * memory, size_t size);

// These pages stay in memory; 0 or errno.
int lock_pages(void * memory, size_t size);

// Whole pages of memory in use go back to the system, and are zeros when they are touched again: how many bytes. 0
// where the system has no such call.
size_t give_back_pages(void * memory, size_t size);

} // namespace mixedkv
