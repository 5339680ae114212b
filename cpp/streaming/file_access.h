// What systems do differently with files and pages; the rest of this folder is POSIX. Where a system has no way of its
// own, reading goes through the page cache: slower, and the same bytes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <sys/stat.h>

namespace mixedkv {

// of an open file
std::string name_of(int fd);

// The file behind a descriptor again, past the page cache or through it; -1 and errno where that cannot be.
int open_again(int fd, bool direct);

// of the file's last change: differs after another
int64_t changed_at(const struct stat & status);

// The system need not keep these pages of the file, or of a map of it.
void forget(int fd, uint64_t offset, uint64_t size);
void forget(void * mapped, size_t size);

// These pages of a mapped file are there when this returns, or will be soon; 0 or errno.
int fetch(void * mapped, size_t size);

// Memory that is used all at once.
void use_large_pages(void * memory, size_t size);

} // namespace mixedkv
