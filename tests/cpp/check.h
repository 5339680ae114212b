// The one check that plain test executables need: says what failed and where, and ends the test.

#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(...)                                                                           \
    do {                                                                                     \
        if (!(__VA_ARGS__)) {                                                                \
            std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #__VA_ARGS__); \
            std::exit(1);                                                                    \
        }                                                                                    \
    } while (false)
