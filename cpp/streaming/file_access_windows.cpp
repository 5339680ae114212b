#include "file_access.h"

#ifdef _WIN32

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

#ifndef NOMINMAX
#define NOMINMAX
#endif
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include <io.h>

namespace mixedkv {

static HANDLE handle(system_file file) {
    return reinterpret_cast<HANDLE>(file);
}

static int error_number() {
    return std::error_code(int(GetLastError()), std::system_category()).default_error_condition().value();
}

std::string name_of(int fd) {
    std::wstring name(32768, 0); // the longest there is
    const HANDLE file = reinterpret_cast<HANDLE>(_get_osfhandle(fd));
    name.resize(GetFinalPathNameByHandleW(file, name.data(), DWORD(name.size()), FILE_NAME_NORMALIZED));
    if (name.empty()) {
        return "the model's file";
    }
    const std::wstring prefix = L"\\\\?\\";
    return std::filesystem::path(name.compare(0, prefix.size(), prefix) == 0 ? name.substr(prefix.size()) : name)
        .u8string();
}

system_file open_again(int fd, bool direct) {
    const DWORD  share = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;
    const DWORD  flags = FILE_FLAG_OVERLAPPED | (direct ? FILE_FLAG_NO_BUFFERING : 0); // threads read beside each other
    const HANDLE again = ReOpenFile(reinterpret_cast<HANDLE>(_get_osfhandle(fd)), GENERIC_READ, share, flags);
    if (again == INVALID_HANDLE_VALUE) {
        errno = error_number();
        return NO_FILE;
    }
    return reinterpret_cast<system_file>(again);
}

void close_file(system_file file) {
    CloseHandle(handle(file));
}

bool get_status(system_file file, file_status & status) {
    BY_HANDLE_FILE_INFORMATION found;
    if (!GetFileInformationByHandle(handle(file), &found)) {
        errno = error_number();
        return false;
    }
    status.size = uint64_t(found.nFileSizeHigh) << 32 | found.nFileSizeLow;
    status.changed =
        int64_t(uint64_t(found.ftLastWriteTime.dwHighDateTime) << 32 | found.ftLastWriteTime.dwLowDateTime);
    return true;
}

int64_t read_at(system_file file, void * to, uint64_t size, uint64_t offset) {
    OVERLAPPED where = {};
    where.Offset     = DWORD(offset);
    where.OffsetHigh = DWORD(offset >> 32);
    where.hEvent     = CreateEventA(nullptr, TRUE, FALSE, nullptr);
    DWORD      n     = 0;
    const auto most  = DWORD(std::min<uint64_t>(size, 1 << 30));
    bool       good  = where.hEvent;
    if (good && !ReadFile(handle(file), to, most, nullptr, &where)) {
        good = GetLastError() == ERROR_IO_PENDING;
    }
    good = good && GetOverlappedResult(handle(file), &where, &n, TRUE);
    if (!good) {
        good  = GetLastError() == ERROR_HANDLE_EOF;
        errno = error_number();
        n     = 0;
    }
    if (where.hEvent) {
        CloseHandle(where.hEvent);
    }
    return good ? int64_t(n) : -1;
}

void * map_file(system_file file, uint64_t) {
    const HANDLE mapping = CreateFileMappingA(handle(file), nullptr, PAGE_READONLY, 0, 0, nullptr);
    void *       at      = nullptr;
    if (mapping) {
        at = MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, 0);
    }
    if (!at) {
        errno = error_number();
    }
    if (mapping) {
        CloseHandle(mapping); // the view keeps it
    }
    return at;
}

void unmap_file(void * mapped, uint64_t) {
    UnmapViewOfFile(mapped);
}

void forget(system_file, uint64_t, uint64_t) {}

void forget(void * mapped, size_t size) {
    VirtualUnlock(mapped, size); // of pages that are not locked: they leave the working set
}

int fetch(void * mapped, size_t size) {
    WIN32_MEMORY_RANGE_ENTRY range = { mapped, size };
    PrefetchVirtualMemory(GetCurrentProcess(), 1, &range, 0); // what it did not bring comes when it is read
    return 0;
}

void * allocate_pages(size_t size, bool) {
    return VirtualAlloc(nullptr, size, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
}

void free_pages(void * memory, size_t) {
    VirtualFree(memory, 0, MEM_RELEASE);
}

void use_large_pages(void *, size_t) {} // takes a privilege that users rarely have

int lock_pages(void * memory, size_t size) {
    // no more than the working set may be locked
    SIZE_T least = 0, most = 0;
    if (GetProcessWorkingSetSize(GetCurrentProcess(), &least, &most)) {
        SetProcessWorkingSetSize(GetCurrentProcess(), least + size, most + size);
    }
    return VirtualLock(memory, size) ? 0 : error_number();
}

size_t give_back_pages(void *, size_t) {
    return 0;
}

} // namespace mixedkv

#endif
