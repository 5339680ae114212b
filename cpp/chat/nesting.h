// Bounds recursion in llama.cpp's chat layer: a template or an answer that is nested deeper is an error, not the end of
// the process. vendor/patches/07-chat-nesting.patch has the call sites.

#pragma once

#include <stdexcept>

namespace mixedkv {

class nesting {
  public:
    nesting() {
        if (depth() >= max_depth) {
            throw std::runtime_error("nested too deep");
        }
        depth()++;
    }
    ~nesting() { depth()--; }

    nesting(const nesting &)             = delete;
    nesting & operator=(const nesting &) = delete;

  private:
    static constexpr int max_depth = 1000; // of 1 to 2 KB of stack each; a level of JSON is about six

    static int & depth() {
        static thread_local int depth = 0;
        return depth;
    }
};

} // namespace mixedkv
