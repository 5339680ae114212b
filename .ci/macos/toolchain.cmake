# The package ziglang compiles and links for macOS: it has the headers of macOS's own library, and the list of its symbols.
# -DMIXEDKV_MACOS=aarch64 or x86_64; `python` on PATH is one with ziglang.
if(NOT MIXEDKV_MACOS MATCHES "^(aarch64|x86_64)$")
    message(FATAL_ERROR "MIXEDKV_MACOS=${MIXEDKV_MACOS} is not a processor: give aarch64 or x86_64")
endif()
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES MIXEDKV_MACOS)
set(CMAKE_SYSTEM_NAME Darwin)
string(REPLACE aarch64 arm64 CMAKE_SYSTEM_PROCESSOR ${MIXEDKV_MACOS}) # macOS's name for it
find_program(python python REQUIRED)

# CMake calls each tool as a program of one word. zig names processors otherwise than clang does (-march), and without an -O
# it makes a C++ library of its own for each kind of program.
foreach(tool cc c++ ar ranlib)
    set(arguments)
    if(tool MATCHES "^c")
        set(arguments "-target ${MIXEDKV_MACOS}-macos.11.0 -O3 -fno-sanitize=undefined")
    endif()
    set(program ${CMAKE_BINARY_DIR}/zig-${tool})
    file(CONFIGURE OUTPUT ${program} @ONLY CONTENT [=[#!/bin/sh
for word do
    shift
    case $word in -march=armv8.2-a*) word=-mcpu=apple_m1${word#-march=armv8.2-a} ;; esac
    set -- "$@" "$word"
done
exec '@python@' -m ziglang @tool@ @arguments@ "$@"
]=])
    file(CHMOD ${program} PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
endforeach()
set(CMAKE_C_COMPILER ${CMAKE_BINARY_DIR}/zig-cc)
set(CMAKE_CXX_COMPILER ${CMAKE_BINARY_DIR}/zig-c++)
set(CMAKE_AR ${CMAKE_BINARY_DIR}/zig-ar)
set(CMAKE_RANLIB ${CMAKE_BINARY_DIR}/zig-ranlib)
set(CMAKE_INSTALL_NAME_TOOL true) # nothing is installed
set(CMAKE_USER_MAKE_RULES_OVERRIDE ${CMAKE_CURRENT_LIST_DIR}/rpath.cmake)
