// The kernels for GPUs, on a CPU that plays one, against the double-precision reference over random shapes:
// test_kernels [--shapes N] [--seed N]

#include "../support.h"
#include "attention/cuda/launch.h"
#include "attention/least_error.h"
#include "attention/lm4.h"
#include "attention/tc3.h"
#include "prefill_variants.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <string>
#include <vector>

using mixedkv::q4_0_from_float;
using mixedkv::q5_0_from_float;
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
           : type == row_type::q4_0 ? stored_type::q4_0
           : type == row_type::lm4  ? stored_type::lm4
                                    : stored_type::tc3;
}

// Those that heads of d can have
std::vector<row_type> types_for(int d) {
    std::vector<row_type> res{ row_type::f16, row_type::q8_0, row_type::q5_0, row_type::q4_0 };
    if (d % 64 == 0) {
        res.insert(res.end(), { row_type::lm4, row_type::tc3 });
    }
    return res;
}

bool has_levels(row_type type) {
    return type == row_type::lm4 || type == row_type::tc3;
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

void expect_close(const test::problem & p, const std::vector<double> & want, const std::string & what) {
    const double worst = test::worst_error(p.out, want, want.size());
    // Q, weights and dequantised values are rounded to F16
    if (!(worst <= 4e-3)) {
        std::printf("FAIL %s: error %.2e: %s\n", what.c_str(), worst, p.o.describe().c_str());
        failures++;
    }
}

// Rows of the micro-batch lie in the ring where they were to go, and nowhere else.
void expect_ring(const row_view & ring, int n_ring, const std::vector<uint8_t> & before, const row_view & current,
                 const std::vector<int64_t> & rows, const char * what) {
    for (int i = 0; i < n_ring; i++) {
        const void * want = before.data() + i * ring.row;
        for (size_t token = 0; token < rows.size(); token++) {
            want = rows[token] == i && i < n_ring - 1 ? current.data + token * current.row : want;
        }
        if (std::memcmp(ring.data + i * ring.row, want, ring.row) != 0) {
            std::printf("FAIL %s: row %d of the ring\n", what, i);
            failures++;
        }
    }
}

// variant: which shape of prefill
template <int d>
void attend(test::problem & t, test::rng & r, const device_size & size, int variant) {
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
    const int                   n_cold = round_up(p.cold.n, 8), width = round_up(n_cold + p.n_hot(), 32) + 32;
    // cold rows are as many as the mask says: the reader of a key behind the last takes the last
    const std::vector<uint16_t> mask = widen_mask(t, n_cold, width);
    p.mask                           = mask.data();
    p.mask_token                     = width;
    p.first_hot_key                  = n_cold;

    int prefill_rows = 0, no = 0;
    prefill_variants<d>::for_each(
        [&](auto shape) { prefill_rows = no++ == variant ? decltype(shape)::rows : prefill_rows; });
    plan_splits(p, size, prefill_rows);
    std::vector<float> sums(sums_floats(p, d), NAN), weights(weights_floats(p), NAN);
    p.sums    = sums.data();
    p.weights = weights.data();
    p.out     = t.out.data();
    std::vector<int64_t> ring_rows; // the last row is the one that nobody reads
    for (int i = 0; i < p.n_tokens; i++) {
        ring_rows.push_back(i < p.ring.n - 1 ? i : p.ring.n - 1);
    }
    std::shuffle(ring_rows.begin(), ring_rows.end(), r.engine);
    const std::vector<uint8_t> ring_k(p.ring.k.data, p.ring.k.data + p.ring.n * p.ring.k.row);
    const std::vector<uint8_t> ring_v(p.ring.v.data, p.ring.v.data + p.ring.n * p.ring.v.row);
    p.ring_rows = p.ring.n > 0 ? ring_rows.data() : nullptr;

    emulated device;
    if (variant == 0) {
        run_attention<emulated, d>(device, p, to_stored(t.o.type_k[0]), to_stored(t.o.type_v[0]));
    }
    no = 0;
    prefill_variants<d>::for_each([&](auto shape) {
        if (no++ == variant && variant > 0) {
            run_prefill<emulated, d, decltype(shape)>(device, p, to_stored(t.o.type_k[0]), to_stored(t.o.type_v[0]));
            run_merge<emulated, d>(device, p);
        }
    });
    if (p.ring_rows) {
        expect_ring(p.ring.k, p.ring.n, ring_k, p.current.k, ring_rows, "K");
        expect_ring(p.ring.v, p.ring.n, ring_v, p.current.v, ring_rows, "V");
    }
}

// Runs the problem, and if it is prefill another shape of the kernel besides.
void attend_all(test::problem & t, test::rng & r, const device_size & size) {
    const auto want = t.reference(); // rows of the ring are about to change
    const auto run  = [&](auto d) {
        constexpr int head = decltype(d)::value, n = prefill_variants<head>::n;
        const bool    is_prefill = t.o.n_queries * t.o.n_head / t.o.n_head_kv > decode_rows;
        test::problem again      = t;
        attend<head>(t, r, size, 0);
        expect_close(t, want, is_prefill ? "prefill" : "decode");
        if (is_prefill) {
            const int variant = 1 + r.below(n - 1);
            attend<head>(again, r, size, variant);
            expect_close(again, want, "prefill, variant " + std::to_string(variant));
        }
    };
    switch (t.o.d_k) {
    case 64:
        return run(std::integral_constant<int, 64>());
    case 96:
        return run(std::integral_constant<int, 96>());
    case 128:
        return run(std::integral_constant<int, 128>());
    default:
        return run(std::integral_constant<int, 256>());
    }
}

test::options random_options(test::rng & r) {
    using test::mask_kind;
    test::options o;
    o.n_head_kv = r.pick<int>({ 1, 2, 3 });
    o.n_head    = o.n_head_kv * r.pick<int>({ 1, 2, 3, 4, 8 });
    o.d_k = o.d_v    = r.pick<int>({ 64, 96, 128, 128, 256 });
    const auto types = types_for(o.d_k);
    o.n_queries      = r.chance(0.6) ? 1 + r.below(4) : 1 + r.below(60);
    o.mask           = r.pick<mask_kind>({ mask_kind::none, mask_kind::causal, mask_kind::window, mask_kind::holes,
                                           mask_kind::all_hidden, mask_kind::alibi });
    o.softcap        = r.chance(0.2) ? 10.0f : 0.0f;
    o.sinks          = r.chance(0.3);
    o.scaled         = r.chance(0.3);
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

// What a row of the type holds, and the scale of each element
void dequantise_row(row_type type, const uint8_t * row, int n, std::vector<double> & value,
                    std::vector<double> & scale) {
    std::vector<float> levels(n);
    if (has_levels(type)) {
        (type == row_type::lm4 ? lm4_to_float : tc3_to_float)(row, levels.data(), n);
        value.assign(levels.begin(), levels.end());
        return;
    }
    value.clear();
    scale.clear();
    for (int i = 0; i < n; i++) {
        const int       unit = i / 32, e = i % 32;
        const uint8_t * p = row + unit * test::row_size(type, 32);
        uint16_t        bits;
        std::memcpy(&bits, type == row_type::f16 ? p + 2 * e : p, 2);
        const double x      = test::from_half(bits);
        const auto   nibble = [&](const uint8_t * q) { return e < 16 ? q[e] & 15 : q[e - 16] >> 4; };
        scale.push_back(type == row_type::f16 ? std::fabs(x) / 1024 : std::fabs(x));
        value.push_back(type == row_type::f16    ? x
                        : type == row_type::q8_0 ? x * int8_t(p[2 + e])
                        : type == row_type::q4_0 ? x * (nibble(p + 2) - 8)
                                                 : x * ((nibble(p + 6) | (p[2 + e / 8] >> e % 8 & 1) << 4) - 16));
    }
}

bool is_near(row_type type, const std::vector<double> & got, const std::vector<double> & want,
             const std::vector<double> & scale) {
    double error = 0.0, square = 0.0;
    for (size_t i = 0; i < want.size(); i++) {
        error += (got[i] - want[i]) * (got[i] - want[i]);
        square += want[i] * want[i];
        // a scale is rounded to F16; what is opposite to the largest of a block of nibbles may be more than a step off
        if (!has_levels(type) &&
            !(std::fabs(got[i] - want[i]) <= (type == row_type::q8_0 ? 0.54 : 1.8) * scale[i] + 1e-3)) {
            return false;
        }
    }
    return error <= (type == row_type::lm4   ? 0.05
                     : type == row_type::tc3 ? 0.2
                                             : 1.0) *
                        square; // bits are compared elsewhere
}

// Rows that kernels have stored, of K and of V
struct stored_rows {
    int                   n_tokens, n_heads, d;
    row_type              types[2];
    std::vector<float>    from[2], scales;
    std::vector<uint8_t>  cold[2];
    std::vector<int64_t>  rows;
    std::vector<uint16_t> f16;
    store_problem         p;

    int          n() const { return n_heads * d; }
    size_t       row_bytes(int side) const { return test::row_size(types[side], n()); }
    store_rows & side(int i) { return i ? p.v : p.k; }

    stored_rows(test::rng & r, int d, int n_tokens, row_type type_k, row_type type_v) :
        n_tokens(n_tokens), n_heads(1 + r.below(3)), d(d), types{ type_k, type_v }, scales(n()), rows(8),
        f16(n_tokens * 2 * n()) {
        p.n_tokens  = n_tokens;
        p.n_head_kv = n_heads;
        p.f16       = f16.data();
        for (int i = 0; i < 8; i++) {
            rows[i] = i;
        }
        std::shuffle(rows.begin(), rows.end(), r.engine);
        for (float & x : scales) {
            x = std::exp2(r.gauss());
        }
        for (int i = 0; i < 2; i++) {
            for (int j = 0; j < n_tokens * n(); j++) {
                from[i].push_back(r.gauss());
            }
            cold[i].assign(8 * row_bytes(i), 0);
            store_rows & s = side(i);
            s.from         = reinterpret_cast<const char *>(from[i].data());
            s.from_token   = n() * 4;
            s.from_head    = d * 4;
            s.scale        = i == 0 ? scales.data() : nullptr;
            s.rotation     = r.pick<int>({ 0, 32, d % 64 ? 32 : 64 });
            s.cold         = reinterpret_cast<char *>(cold[i].data());
            s.cold_row     = int64_t(row_bytes(i));
            s.cold_rows    = rows.data();
        }
    }
    stored_rows(const stored_rows &) = delete;

    void run() {
        emulated device;
        switch (d) {
        case 64:
            return run_store<emulated, 64>(device, p, to_stored(types[0]), to_stored(types[1]));
        case 96:
            return run_store<emulated, 96>(device, p, to_stored(types[0]), to_stored(types[1]));
        case 128:
            return run_store<emulated, 128>(device, p, to_stored(types[0]), to_stored(types[1]));
        default:
            return run_store<emulated, 256>(device, p, to_stored(types[0]), to_stored(types[1]));
        }
    }

    const uint8_t * row(int i, int token) const { return cold[i].data() + rows[token] * row_bytes(i); }
};

void store(test::rng & r, int d) {
    stored_rows s(r, d, 1 + r.below(5), r.pick(types_for(d)), r.pick(types_for(d)));
    const int   n = s.n();
    s.p.f16       = r.chance(0.7) ? s.p.f16 : nullptr; // without a ring in llama.cpp's own scales
    s.run();
    for (int token = 0; token < s.n_tokens; token++) {
        for (int side = 0; side < 2; side++) {
            std::vector<double> want, got, scale;
            for (int i = 0; i < n; i++) {
                want.push_back(double(s.from[side][token * n + i]) * (side == 0 ? s.scales[i] : 1.0f));
            }
            want = s.side(side).rotation ? test::rotated(want, s.side(side).rotation) : want;
            dequantise_row(s.types[side], s.row(side, token), n, got, scale);
            bool ok = is_near(s.types[side], got, want, scale);
            for (int i = 0; s.p.f16 && i < n; i++) {
                const double hot = test::from_half(s.f16[(token * 2 + side) * n + i]);
                ok &= std::fabs(hot - want[i]) <= std::fabs(want[i]) / 1024 + 1e-5;
            }
            if (!ok) {
                std::printf("FAIL store: type %d, heads of %d\n", int(s.types[side]), d);
                failures++;
            }
        }
    }
}

// Rows are those of a CPU bit by bit, whatever is in them.
void store_same_bits(test::rng & r, int d) {
    const std::map<row_type, void (*)(const float *, void *, int64_t)> writers = {
        { row_type::lm4, lm4_from_float },
        { row_type::tc3, tc3_from_float },
        { row_type::q4_0, q4_0_from_float },
        { row_type::q5_0, q5_0_from_float },
    };
    const auto  pick = [&] { return std::next(writers.begin(), r.below(int(writers.size())))->first; };
    stored_rows s(r, d, 2, pick(), pick());
    s.p.k.rotation = s.p.v.rotation = 0; // what is stored is what came, times its scale
    const int   kind                = r.below(6);
    const float size                = std::exp2(float(r.below(40) - 26));
    for (auto & from : s.from) {
        for (float & x : from) {
            x = kind == 0   ? x * size
                : kind == 1 ? x * x * x * x * x * size               // a few large ones
                : kind == 2 ? (r.chance(0.02) ? x : 0.0f) * size     // nearly all zero
                : kind == 3 ? float(r.below(3) - 1) * size           // ties
                : kind == 4 ? float(r.below(256) - 127) / 127 * size // on the levels, and between them
                            : (r.chance(0.01) ? 1e20f : x);          // beyond F16
        }
    }
    s.run();
    for (int token = 0; token < s.n_tokens; token++) {
        for (int side = 0; side < 2; side++) {
            std::vector<float> x(s.from[side].begin() + token * s.n(), s.from[side].begin() + (token + 1) * s.n());
            for (int i = 0; i < s.n(); i++) {
                x[i] = std::clamp(x[i] * (side == 0 ? s.scales[i] : 1.0f), -65504.0f, 65504.0f);
            }
            std::vector<uint8_t> want(s.row_bytes(side));
            writers.at(s.types[side])(x.data(), want.data(), s.n());
            if (std::memcmp(want.data(), s.row(side, token), want.size()) != 0) {
                std::printf("FAIL type %d: not the bits of a CPU, kind %d, size %g, heads of %d\n", int(s.types[side]),
                            kind, size, d);
                failures++;
            }
        }
    }
}

// Rows that ggml's nodes get are those of a CPU bit by bit, and so are rows that they set.
void convert(test::rng & r, row_type type) {
    const int    n = 64 * (1 + r.below(9)), n_rows = 1 + r.below(5), n_stream = 1 + r.below(2), n_cells = 8;
    const bool   wide = r.chance(0.5), numbered = r.chance(0.8);
    const size_t row = test::row_size(type, n);

    std::vector<float> x(n_rows * n);
    std::generate(x.begin(), x.end(), [&] { return r.gauss(); });
    std::vector<int64_t> wide_numbers;
    for (int i = 0; i < n_stream * n_rows; i++) {
        wide_numbers.push_back(numbered ? (i * 3 + 1) % n_cells : i % n_rows);
    }
    const std::vector<int32_t> numbers(wide_numbers.begin(), wide_numbers.end());
    std::vector<uint8_t>       stored(n_stream * n_cells * row, 0);

    convert_problem p;
    p.n_elements = n;
    p.n_rows     = n_rows;
    p.stored     = { reinterpret_cast<const char *>(stored.data()), int64_t(row), 0, int64_t(n_cells * row) };
    p.plain      = { reinterpret_cast<const char *>(x.data()), n * 4, 0, 0 };
    if (numbered) {
        p.numbers = { wide ? reinterpret_cast<const char *>(wide_numbers.data())
                           : reinterpret_cast<const char *>(numbers.data()),
                      wide, n_rows };
    }
    emulated device;
    run_set(device, p, to_stored(type));
    bool ok = true;
    for (int i = 0; i < n_rows; i++) {
        std::vector<uint8_t> want(row);
        (type == row_type::lm4 ? lm4_from_float : tc3_from_float)(x.data() + i * n, want.data(), n);
        ok &= std::memcmp(want.data(), stored.data() + wide_numbers[i] * row, row) == 0;
    }
    std::copy(stored.begin(), stored.begin() + n_cells * row, stored.end() - n_cells * row); // all streams have them

    std::vector<float> got(n_stream * n_rows * n), want(n);
    p.n_stream = n_stream;
    p.plain    = { reinterpret_cast<const char *>(got.data()), n * 4, 0, int64_t(n_rows) * n * 4 };
    run_get(device, p, to_stored(type));
    for (int i = 0; i < n_stream * n_rows; i++) {
        (type == row_type::lm4 ? lm4_to_float : tc3_to_float)(stored.data() + wide_numbers[i] * row, want.data(), n);
        ok &= std::memcmp(want.data(), got.data() + i * n, n * 4) == 0;
    }
    p.to_f16 = true;
    std::vector<uint16_t> f16(n_rows * n);
    p.n_stream = 1;
    p.plain    = { reinterpret_cast<const char *>(f16.data()), n * 2, 0, 0 };
    run_get(device, p, to_stored(type));
    for (int i = 0; i < n_rows * n; i++) {
        ok &= f16[i] == test::to_half(got[i]);
    }
    if (!ok) {
        std::printf("FAIL rows of %s that nodes get and set\n", type == row_type::lm4 ? "lm4" : "tc3");
        failures++;
    }
}

} // namespace

int main(int argc, char ** argv) {
    test::rng r(uint32_t(test::number_after(argc, argv, "--seed", 1)));
    const int n_shapes = test::number_after(argc, argv, "--shapes", 40);
    for (int i = 0; i < n_shapes; i++) {
        const test::options o = random_options(r);
        test::problem       p(r, o);
        attend_all(p, r, { 1 + r.below(8), 1 + r.below(4), 1 + r.below(2) });
    }
    for (int i = 0; i < n_shapes; i++) {
        for (const int d : { 64, 96, 128, 256 }) {
            store(r, d);
        }
        store_same_bits(r, r.pick<int>({ 64, 128, 256 }));
        convert(r, i % 2 ? row_type::lm4 : row_type::tc3);
    }
    std::printf("%d shapes, %d failures\n", n_shapes, failures);
    return failures ? 1 : 0;
}
