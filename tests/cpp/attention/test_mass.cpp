// attention_mass against attention_run: where V of key j is the j-th unit vector, the output is the weights.

#include "attention/sparse/mass.h"

#include "check.h"
#include "support.h"

#include <cmath>
#include <cstdio>
#include <cstring>

namespace {

void set_value(test::rows & rows, int64_t row, int at) {
    const uint16_t one = test::to_half(1.0f);
    for (int head = 0; head < rows.n_head; head++) {
        char * data = reinterpret_cast<char *>(rows.bytes.data()) + row * rows.row_bytes + head * rows.head_bytes;
        std::memset(data, 0, 2 * rows.d);
        if (at >= 0) {
            std::memcpy(data + 2 * at, &one, 2);
        }
    }
}

void compare(test::options o, int n_threads, mixedkv::row_type type_k = mixedkv::row_type::f16) {
    o.d_v    = 64;
    o.n_keys = { 64, 30 };
    o.type_k = { type_k, mixedkv::row_type::f16 };
    o.type_v = { mixedkv::row_type::f16, mixedkv::row_type::f16 };

    test::rng     r(7);
    test::problem p(r, o);
    for (int64_t key = 0; key < 64; key++) {
        set_value(p.v[0], key, int(key));
    }
    for (int64_t key = 0; key < 30; key++) { // of the second segment nothing is told
        set_value(p.v[1], key, -1);
    }
    test::run({ p.args() }, 1);

    std::vector<double> want(64, 0.0);
    for (size_t i = 0; i < p.out.size(); i++) {
        want[i % 64] += p.out[i];
    }
    std::vector<float> mass(64, 0.0f);
    for (int ith = 0; ith < n_threads; ith++) {
        std::vector<float> own(64, 0.0f);
        mixedkv::attention_mass(p.args(), ith, n_threads, own.data());
        for (int i = 0; i < 64; i++) {
            mass[i] += own[i];
        }
    }
    double total = 0.0;
    for (int i = 0; i < 64; i++) {
        if (!(std::fabs(mass[i] - want[i]) <= 2e-3 * (1.0 + want[i]))) {
            std::printf("key %d: %g, not %g: %s\n", i, mass[i], want[i], p.o.describe().c_str());
        }
        CHECK(std::fabs(mass[i] - want[i]) <= 2e-3 * (1.0 + want[i]));
        total += mass[i];
    }
    CHECK(o.mask == test::mask_kind::all_hidden ? total == 0.0 : total > 0.1);
}

} // namespace

int main() {
    if (!test::force_isa("scalar")) {
        return 77;
    }
    for (const auto mask : { test::mask_kind::none, test::mask_kind::causal, test::mask_kind::holes,
                             test::mask_kind::alibi, test::mask_kind::all_hidden }) {
        for (const int n_threads : { 1, 2, 5 }) {
            test::options o;
            o.mask      = mask;
            o.n_queries = 5;
            compare(o, n_threads);
            o.softcap    = 5.0f;
            o.rotation_q = 64;
            o.scaled     = true;
            compare(o, n_threads);
        }
    }
    test::options o;
    o.sinks = true;
    compare(o, 1);
    for (const auto type : test::all_types()) {
        test::options typed;
        typed.n_queries = 5;
        compare(typed, 2, type);
        typed.n_pairs    = 3; // whose bias is subtracted from K
        typed.rotation_q = 64;
        typed.scaled     = true;
        compare(typed, 2, type);
        typed.softcap = 5.0f;
        compare(typed, 2, type);
    }
    return 0;
}
