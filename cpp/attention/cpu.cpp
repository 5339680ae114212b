// Which instruction sets the processor has and the operating system saves. Compiled for the baseline.

#include "kernel.h"

#include <initializer_list>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace mixedkv {

#if defined(__x86_64__) && defined(__GNUC__)
namespace {

struct registers {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

registers cpuid(unsigned leaf, unsigned subleaf) {
    registers r;
    __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
    return r;
}

bool bits(unsigned word, std::initializer_list<int> wanted) {
    for (int bit : wanted) {
        if (!(word >> bit & 1)) {
            return false;
        }
    }
    return true;
}

// Register state that the operating system saves: 1, 2 SSE and AVX; 5, 6, 7 AVX-512; 17, 18 AMX.
bool os_saves(std::initializer_list<int> components) {
    if (!bits(cpuid(1, 0).ecx, { 27 })) { // OSXSAVE
        return false;
    }
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return bits(low, components);
}

// Linux gives a process the AMX state on demand; the grant covers all its threads, and asking again is harmless.
bool amx_permitted() {
#ifdef __linux__
    constexpr int request_permission = 0x1023; // ARCH_REQ_XCOMP_PERM
    constexpr int tile_data          = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}

} // namespace

bool cpu_has_avx2() {
    return os_saves({ 1, 2 }) && bits(cpuid(1, 0).ecx, { 12, 28, 29 }) && // FMA, AVX, F16C
           bits(cpuid(7, 0).ebx, { 5 });                                  // AVX2
}

bool cpu_has_avxvnni() {
    return cpu_has_avx2() && bits(cpuid(7, 1).eax, { 4 });
}

bool cpu_has_avx512() {
    return cpu_has_avx2() && os_saves({ 5, 6, 7 }) && bits(cpuid(7, 0).ebx, { 16, 17, 30, 31 }) && // F, DQ, BW, VL
           bits(cpuid(7, 0).ecx, { 1, 11 });                                                       // VBMI, VNNI
}

bool cpu_has_amx() {
    return cpu_has_avx512() && bits(cpuid(7, 1).eax, { 5 }) && // AVX512_BF16
           bits(cpuid(7, 0).edx, { 22, 24, 25 }) &&            // AMX_BF16, AMX_TILE, AMX_INT8
           os_saves({ 17, 18 }) && amx_permitted();
}
#else
bool cpu_has_avx2() {
    return false;
}
bool cpu_has_avxvnni() {
    return false;
}
bool cpu_has_avx512() {
    return false;
}
bool cpu_has_amx() {
    return false;
}
#endif

#if defined(__aarch64__) && defined(__APPLE__)
static bool has_feature(const char * name) {
    int    value = 0;
    size_t size  = sizeof(value);
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
#endif

bool cpu_has_neon() {
#ifdef __aarch64__
    return true; // part of the baseline
#else
    return false;
#endif
}

// Linux says in the auxiliary vector what the kernel and the processor have, macOS by name.
bool cpu_has_dotprod() {
#if defined(__aarch64__) && defined(__linux__)
    return getauxval(AT_HWCAP) >> 20 & 1; // HWCAP_ASIMDDP
#elif defined(__aarch64__) && defined(__APPLE__)
    return has_feature("hw.optional.arm.FEAT_DotProd");
#else
    return false;
#endif
}

bool cpu_has_i8mm() {
#if defined(__aarch64__) && defined(__linux__)
    return cpu_has_dotprod() && (getauxval(AT_HWCAP2) >> 13 & 1); // HWCAP2_I8MM
#elif defined(__aarch64__) && defined(__APPLE__)
    return cpu_has_dotprod() && has_feature("hw.optional.arm.FEAT_I8MM");
#else
    return false;
#endif
}

} // namespace mixedkv
