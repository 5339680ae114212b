// The kernels for GPUs, on a CPU that plays one, against the double-precision reference over random shapes:
// test_kernels [--shapes N] [--seed N]

#include "../support.h"
#include "attention/cuda/launch.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

using mixedkv::row_type;
using namespace mixedkv::cuda;

namespace {

int failures = 0;

struct emulated {
    template <class Kernel, class... Args>
    void launch(grid_size grid, int threads, size_t bytes, Kernel kernel, Args... args) {
        mixedkv::cuda::launch(grid, threads, bytes, [&] { kernel(args...); });
    }
};

stored_type to_stored(row_type type) {
    return type == row_type::f16    ? stored_type::f16
           : type == row_type::q8_0 ? stored_type::q8_0
           : type == row_type::q5_0 ? stored_type::q5_0
                                    : stored_type::q4_0;
}

row_view to_view(const mixedkv::attention_rows & rows) {
    row_view v;
    v.data = static_cast<const char *>(rows.data);
    v.row  = int64_t(rows.row);
    v.head = int64_t(rows.head);
    return v;
}

// Rows of the mask begin at multiples of 16 bytes, and so do the keys behind the cold ones.
std::vector<uint16_t> widen_mask(const test::problem & p, int n_cold, int width) {
    std::vector<uint16_t> res(size_t(width) * p.o.n_queries, hidden);
    const int64_t         n = p.n_keys();
    for (int64_t i = 0; i < p.o.n_queries; i++) {
        for (int64_t j = 0; j < n; j++) {
            const uint16_t x = p.mask.empty() ? uint16_t(0) : p.mask[i * n + j];
            res[i * width + (j < p.o.n_keys[0] ? j : j - p.o.n_keys[0] + n_cold)] = x;
        }
    }
    return res;
}

void expect_close(const test::problem & p, const char * what) {
    const std::vector<double> want  = p.reference();
    double                    worst = 0.0;
    for (size_t i = 0; i < want.size(); i++) {
        const double error = std::fabs(p.out[i] - want[i]) / 4.0;
        worst              = error <= worst ? worst : error; // NaN stays
    }
    // Q, weights and opened values are rounded to F16
    if (!(worst <= 4e-3)) {
        std::printf("FAIL %s: error %.2e: %s\n", what, worst, p.o.describe().c_str());
        failures++;
    }
}

template <int d>
void attend(test::problem & t, const device_size & size) {
    const mixedkv::attention_args a = t.args();
    attention_problem             p;
    p.n_head         = a.n_head;
    p.n_head_kv      = a.n_head_kv;
    p.n_tokens       = int(a.n_queries);
    p.q              = reinterpret_cast<const char *>(a.q);
    p.q_token        = int64_t(a.q_row);
    p.q_head         = int64_t(a.q_head);
    p.scale_q        = a.scale_q;
    p.rotation_q     = a.rotation_q;
    p.rotation_v     = a.rotation_out;
    p.scale          = a.scale;
    p.max_alibi_bias = a.max_alibi_bias;
    p.logit_softcap  = a.logit_softcap;
    p.sinks          = a.sinks;

    key_segment * const segments[] = { &p.cold, &p.ring, &p.current };
    for (int i = 0; i < a.n_segments; i++) {
        segments[i]->k = to_view(a.segments[i].k);
        segments[i]->v = to_view(a.segments[i].v);
        segments[i]->n = int(a.segments[i].n);
    }
    const int n_cold = round_up(p.cold.n, 8), width = round_up(n_cold + p.n_hot(), 32) + 32;
    // cold rows are as many as the mask says: the reader of a key behind the last takes the last
    const std::vector<uint16_t> mask = widen_mask(t, n_cold, width);
    p.mask                           = mask.data();
    p.mask_token                     = width;
    p.first_hot_key                  = n_cold;

    plan_splits(p, size, d);
    std::vector<float> sums(sums_floats(p, d), NAN), weights(weights_floats(p), NAN);
    p.sums    = sums.data();
    p.weights = weights.data();
    p.out     = t.out.data();
    emulated device;
    run_attention<emulated, d>(device, p, to_stored(t.o.type_k[0]), to_stored(t.o.type_v[0]));
}

void attend(test::problem & t, const device_size & size) {
    switch (t.o.d_k) {
    case 64:
        return attend<64>(t, size);
    case 96:
        return attend<96>(t, size);
    case 128:
        return attend<128>(t, size);
    default:
        return attend<256>(t, size);
    }
}

test::options random_options(test::rng & r) {
    using test::mask_kind;
    const std::vector<row_type> types{ row_type::f16, row_type::q8_0, row_type::q5_0, row_type::q4_0 };
    test::options               o;
    o.n_head_kv = r.pick<int>({ 1, 2, 3 });
    o.n_head    = o.n_head_kv * r.pick<int>({ 1, 2, 3, 4, 8 });
    o.d_k = o.d_v = r.pick<int>({ 64, 96, 128, 128, 256 });
    o.n_queries   = r.chance(0.6) ? 1 + r.below(4) : 1 + r.below(60);
    o.mask = r.pick<mask_kind>({ mask_kind::none, mask_kind::causal, mask_kind::window, mask_kind::holes, mask_kind::all_hidden,
                                 mask_kind::alibi });
    o.softcap = r.chance(0.2) ? 10.0f : 0.0f;
    o.sinks   = r.chance(0.3);
    o.scaled  = r.chance(0.3);
    if (r.chance(0.5)) {
        o.rotation_q   = r.pick<int>({ 16, 32, 64 });
        o.rotation_q   = o.d_k % o.rotation_q ? 32 : o.rotation_q;
        o.rotation_out = o.d_v % 64 ? 32 : 64;
        if (o.d_k == 128 && r.chance(0.5)) {
            o.rotation_q = 128;
        }
    }
    o.n_keys = { 1 + r.below(r.chance(0.2) ? 900 : 200) };
    o.type_k = { r.pick(types) };
    o.type_v = { r.chance(0.5) ? o.type_k[0] : r.pick(types) };
    if (r.chance(0.7)) {
        o.n_keys.insert(o.n_keys.end(), { 1 + r.below(100), o.n_queries });
        o.type_k.insert(o.type_k.end(), 2, row_type::f16);
        o.type_v.insert(o.type_v.end(), 2, row_type::f16);
    }
    return o;
}

int number_after(int argc, char ** argv, const char * name, int otherwise) {
    for (int i = 1; i + 1 < argc; i++) {
        if (!std::strcmp(argv[i], name)) {
            return std::atoi(argv[i + 1]);
        }
    }
    return otherwise;
}

} // namespace

int main(int argc, char ** argv) {
    test::rng r(uint32_t(number_after(argc, argv, "--seed", 1)));
    const int n_shapes = number_after(argc, argv, "--shapes", 40);
    for (int i = 0; i < n_shapes; i++) {
        const test::options o = random_options(r);
        test::problem       p(r, o);
        attend(p, { 1 + r.below(8), 1 + r.below(4), 1 + r.below(2) });
        expect_close(p, "attention");
    }
    std::printf("%d shapes, %d failures\n", n_shapes, failures);
    return failures ? 1 : 0;
}
