// Attention on the stack that musl gives a thread, 128 KiB, for one instruction set: test_stack [--isa NAME]

#include "check.h"
#include "support.h"

#include <cstdio>
#include <cstring>
#include <pthread.h>
#include <string>

using mixedkv::row_type;

namespace {

constexpr size_t stack_bytes = 128 * 1024;

void * attend(void * calls) {
    auto & [args, scratch] = *static_cast<std::pair<mixedkv::attention_args, void *> *>(calls);
    mixedkv::attention_run(&args, 1, scratch, 0, 1);
    return nullptr;
}

void run_on_small_stack(const test::options & o) {
    test::rng     r(17);
    test::problem p(r, o);
    test::run({ p.args() }, 1);
    const std::vector<float> want = p.out;
    std::fill(p.out.begin(), p.out.end(), -1.0f);

    const mixedkv::attention_args              args    = p.args();
    const auto                                 scratch = test::make_scratch(mixedkv::attention_scratch_bytes(&args, 1));
    std::pair<mixedkv::attention_args, void *> call{ args, scratch.get() };

    pthread_attr_t attributes;
    pthread_t      thread;
    CHECK(pthread_attr_init(&attributes) == 0);
    CHECK(pthread_attr_setstacksize(&attributes, stack_bytes) == 0);
    CHECK(pthread_create(&thread, &attributes, attend, &call) == 0);
    CHECK(pthread_join(thread, nullptr) == 0);
    pthread_attr_destroy(&attributes);

    if (std::memcmp(p.out.data(), want.data(), want.size() * sizeof(float)) != 0) {
        std::printf("another output: %s\n", o.describe().c_str());
        std::exit(1);
    }
}

} // namespace

int main(int argc, char ** argv) {
    if (!test::force_isa(argc, argv)) {
        return 77;
    }
    for (const row_type type : test::all_types()) {
        for (const int d : { 64, 256, 1024 }) {
            for (const int n_queries : { 1, 5, 40 }) { // decode, few rows, prefill
                test::options o;
                o.d_k = o.d_v = d;
                o.n_queries   = n_queries;
                o.n_keys      = { 70, 20 };
                o.type_k = o.type_v = { type, row_type::f16 };
                o.mask              = test::mask_kind::causal;
                run_on_small_stack(o);
            }
        }
    }
    std::printf("%s: %zu bytes of stack are enough\n", mixedkv::attention_isa(), stack_bytes);
    return 0;
}
