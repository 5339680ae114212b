// Included before a body of ARM: what it needs to be compiled for another processor.

#pragma once

#include <arm_neon.h> // that of this folder, before it is said what the processor is
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define cpu_has_neon    emulated_neon
#define cpu_has_dotprod emulated_arm
#define cpu_has_i8mm    emulated_arm_i8mm
#define __aarch64__     1
