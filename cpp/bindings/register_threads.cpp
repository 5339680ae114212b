// CPU threads that belong to a context, whichever thread of the process evaluates with it.

#include "bindings.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "llama.h"

#include <memory>
#include <mutex>
#include <set>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif
#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace py = pybind11;
using namespace py::literals;

namespace mixedkv_py {

// Of those that this thread, and with it the pool's, may run on
static int usable_cpus() {
#if defined(__linux__)
    cpu_set_t cpus;
    if (sched_getaffinity(0, sizeof(cpus), &cpus) == 0) {
        return CPU_COUNT(&cpus);
    }
#endif
    const unsigned n = std::thread::hardware_concurrency();
    return n > 0 ? int(n) : GGML_MAX_N_THREADS;
}

// Workers wait this long for the next graph before they sleep, in ggml's units of 131,072 pauses of the CPU: some
// milliseconds, more than Python needs between two tokens. Where threads are more than cores they would take them
// from those that work: no time at all, and little at barriers (thread-wait.h).
static uint32_t poll_level(int n_threads) {
    return n_threads <= usable_cpus() ? 1 : 0;
}

// A function of the CPU backend, which may be a plugin that nothing can be linked with.
template <typename F>
static F * cpu_function(const char * name) {
    ggml_backend_dev_t device  = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    void *             address = ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), name);
    if (!address) {
        throw std::runtime_error(std::string("this ggml has no ") + name);
    }
    return reinterpret_cast<F *>(address);
}

struct pool_deleter {
    void operator()(ggml_threadpool * pool) const {
        cpu_function<decltype(ggml_threadpool_free)>("ggml_threadpool_free")(pool);
    }
};

using pool_ptr = std::unique_ptr<ggml_threadpool, pool_deleter>;

static pool_ptr make_pool(int n_threads) {
    if (n_threads < 1 || n_threads > GGML_MAX_N_THREADS) {
        throw py::value_error("a context takes 1 to " + std::to_string(GGML_MAX_N_THREADS) + " CPU threads, not " +
                              std::to_string(n_threads));
    }
    ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    params.poll                   = poll_level(n_threads);
    return pool_ptr(cpu_function<decltype(ggml_threadpool_new)>("ggml_threadpool_new")(&params));
}

class threads;

// All that there are, for children of this process. Never freed: a child may be forked while Python ends.
static auto & all_threads = *new std::set<threads *>();
static auto & all_mutex   = *new std::mutex();

// Two pools where decode and prefill take different numbers: threads of one that are not needed would spin.
class threads {
  public:
    explicit threads(uintptr_t address) :
        ctx(pointer<llama_context>(address)), decode(make_pool(llama_n_threads(ctx))) {
        if (llama_n_threads_batch(ctx) != llama_n_threads(ctx)) {
            batch = make_pool(llama_n_threads_batch(ctx));
        }
        llama_attach_threadpool(ctx, decode.get(), batch.get());

        const std::lock_guard<std::mutex> lock(all_mutex);
        all_threads.insert(this);
    }

    ~threads() {
        const std::lock_guard<std::mutex> lock(all_mutex);
        all_threads.erase(this);
    }

    threads(const threads &) = delete;

    // Before the context is freed. Can be called again.
    void close() {
        if (decode) {
            llama_detach_threadpool(ctx);
        }
        decode.reset();
        batch.reset();
    }

    // In a forked child, which has none of the threads: to use or to free a pool would wait for them forever. llama.cpp
    // then starts threads for each graph.
    void leave_behind() {
        if (decode) {
            llama_detach_threadpool(ctx);
        }
        (void)decode.release();
        (void)batch.release();
    }

  private:
    llama_context * ctx;
    pool_ptr        decode, batch;
};

static void follow_forks() {
#if !defined(_WIN32)
    pthread_atfork([] { all_mutex.lock(); }, [] { all_mutex.unlock(); },
                   [] {
                       for (threads * one : all_threads) {
                           one->leave_behind();
                       }
                       all_mutex.unlock();
                   });
#endif
}

void register_threads(py::module_ & m) {
    follow_forks();
    py::class_<threads>(m, "Threads").def(py::init<uintptr_t>(), "ctx"_a).def("close", &threads::close);
}

} // namespace mixedkv_py
