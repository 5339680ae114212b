// Memory that each thread has for itself until it ends.

#pragma once

#ifdef __MINGW32__
#include <pthread.h>

#include <memory>
#include <new>
#endif

namespace mixedkv {

// One T for each thread and Tag.
template <class T, class Tag>
T & thread_memory() {
#ifdef __MINGW32__
    // There the destructor of a thread_local object runs when the object's memory is freed already (winpthreads' keys
    // end before it, and GCC keeps such objects behind one of them).
    static const pthread_key_t key = [] {
        pthread_key_t made;
        if (pthread_key_create(&made, [](void * memory) { delete static_cast<T *>(memory); })) {
            throw std::bad_alloc();
        }
        return made;
    }();
    void * memory = pthread_getspecific(key);
    if (!memory) {
        auto made = std::make_unique<T>();
        memory    = made.get();
        if (pthread_setspecific(key, memory)) {
            throw std::bad_alloc();
        }
        made.release();
    }
    return *static_cast<T *>(memory);
#else
    thread_local T memory;
    return memory;
#endif
}

} // namespace mixedkv
