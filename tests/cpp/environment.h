// Variables of the environment, for tests that set them.

#pragma once

#include <cstdlib>

namespace test {

inline void set_variable(const char * name, const char * value) {
#ifdef _WIN32
    _putenv_s(name, value);
#else
    setenv(name, value, 1);
#endif
}

} // namespace test
