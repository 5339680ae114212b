#include "support.h"

#include "../environment.h"
#include "attention/tc3.h"

#include <algorithm>
#include <atomic>
#include <bitset>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <thread>

using mixedkv::row_type;

namespace test {

uint16_t to_half(float x) {
    if (x == 0.0f || std::isinf(x)) {
        return uint16_t((std::signbit(x) ? 0x8000 : 0) | (std::isinf(x) ? 0x7c00 : 0));
    }
    int          e;
    const double m    = std::frexp(std::fabs(double(x)), &e); // [0.5, 1)
    const int    exp  = std::max(e - 1, -14);
    const double unit = std::ldexp(1.0, exp - 10);
    const double n    = std::nearbyint(std::ldexp(m, e) / unit); // 1024 .. 2048 for normal numbers
    const int    bits = n < 1024 ? int(n) : int(n) - 1024 + ((exp + 15) << 10);
    return uint16_t((std::signbit(x) ? 0x8000 : 0) | std::min(bits, 0x7c00));
}

float from_half(uint16_t h) {
    const int   e    = h >> 10 & 31;
    const int   m    = h & 1023;
    const float sign = h & 0x8000 ? -1.0f : 1.0f;
    if (e == 31) {
        return m ? NAN : sign * INFINITY;
    }
    return sign * (e ? std::ldexp(float(1024 + m), e - 25) : std::ldexp(float(m), -24));
}

// Of a block: bytes before the integers, bits of each, elements
struct layout {
    size_t head;
    int    bits;
    int    elements = 32;
};

static layout layout_of(row_type type) {
    switch (type) {
    case row_type::q8_0:
        return { 2, 8 };
    case row_type::q5_0:
        return { 6, 5 };
    case row_type::q4_0:
        return { 2, 4 };
    case row_type::lm4:
        return { 2, 4, 64 };
    case row_type::tc3: // conversions of its own
        return { 2, 0, 64 };
    default:
        return { 0, 0, 1 };
    }
}

int block_elements(row_type type) {
    return layout_of(type).elements;
}

size_t row_size(row_type type, int d) {
    const layout l = layout_of(type);
    if (type == row_type::tc3) {
        return d / TC3_ELEMENTS * TC3_BYTES;
    }
    return l.bits ? d / l.elements * (l.head + l.elements * (l.bits == 8 ? 8 : 4) / 8)
                  : d * 2; // f16; `other` is bf16 here
}

const std::vector<row_type> & all_types() {
    static const std::vector<row_type> types{ row_type::f16, row_type::q8_0, row_type::q4_0, row_type::q5_0,
                                              row_type::lm4, row_type::tc3,  row_type::other };
    return types;
}

const std::vector<row_type> & stored_types() {
    static const std::vector<row_type> types(all_types().begin(), all_types().end() - 1);
    return types;
}

static void bf16_to_float(const void * row, float * out, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = 0;
        std::memcpy(reinterpret_cast<char *>(&bits) + 2, static_cast<const char *>(row) + 2 * i, 2);
        std::memcpy(out + i, &bits, 4);
    }
}

static void store_half(uint8_t * p, float x) {
    const uint16_t h = to_half(x);
    std::memcpy(p, &h, 2);
}

// What integer n of a block stands for, before the scale
static int value_of(row_type type, int n) {
    static constexpr int lm4[16] = { -127, -97, -77, -60, -46, -33, -21, -10, 1, 13, 24, 37, 50, 66, 84, 109 };
    const layout         l       = layout_of(type);
    return type == row_type::lm4 ? lm4[n] : l.bits == 8 ? int8_t(n) : n - (1 << (l.bits - 1));
}

static int get_integer(row_type type, const uint8_t * block, int i) {
    const layout l = layout_of(type);
    if (l.bits == 8) {
        return block[l.head + i];
    }
    const int byte   = block[l.head + i / 32 * 16 + i % 16];
    const int nibble = i % 32 < 16 ? byte & 15 : byte >> 4;
    return nibble | (l.bits == 5 ? (block[l.head - 4 + i / 8] >> i % 8 & 1) << 4 : 0);
}

static void set_integer(row_type type, uint8_t * block, int i, int n) {
    const layout l = layout_of(type);
    if (l.bits == 8) {
        block[l.head + i] = uint8_t(n);
        return;
    }
    uint8_t & byte = block[l.head + i / 32 * 16 + i % 16];
    byte           = uint8_t(i % 32 < 16 ? (byte & 0xf0) | (n & 15) : (byte & 15) | (n & 15) << 4);
    if (l.bits == 5) {
        uint8_t & high = block[l.head - 4 + i / 8];
        high           = uint8_t((high & ~(1 << i % 8)) | (n >> 4) << i % 8);
    }
}

static void quantise(row_type type, const float * x, int d, uint8_t * out) {
    const layout l = layout_of(type);
    for (int b = 0; b < d / l.elements; b++, x += l.elements, out += row_size(type, l.elements)) {
        const auto  ends  = std::minmax_element(x, x + l.elements);
        const float most  = std::max(std::fabs(*ends.first), std::fabs(*ends.second));
        const float scale = most / float(type == row_type::lm4 ? 109 : (1 << (l.bits - 1)) - 1);
        store_half(out, scale);
        for (int i = 0; i < l.elements; i++) {
            if (type == row_type::lm4) {
                int best = 0;
                for (int n = 1; n < 16; n++) {
                    const auto error = [&](int m) { return std::fabs(scale * float(value_of(type, m)) - x[i]); };
                    best             = error(n) < error(best) ? n : best;
                }
                set_integer(type, out, i, best);
            } else {
                const int value = most > 0.0f ? int(std::lrint(x[i] / scale)) : 0;
                set_integer(type, out, i, l.bits == 8 ? value & 255 : value + (1 << (l.bits - 1)));
            }
        }
    }
}

rows::rows(rng & r, row_type type, int64_t n, int n_head, int d, size_t gap) :
    type(type), n(n), n_head(n_head), d(d), head_bytes(row_size(type, d) + gap), row_bytes(n_head * head_bytes + gap),
    bytes(n ? (n - 1) * row_bytes + (n_head - 1) * head_bytes + row_size(type, d) : 0, 0x7e) { // 0x7e7e is a NaN
    std::vector<float> x(d);
    for (int64_t i = 0; i < n * n_head; i++) {
        for (float & e : x) {
            e = r.gauss();
        }
        uint8_t * out = bytes.data() + i / n_head * row_bytes + i % n_head * head_bytes;
        if (type == row_type::tc3) {
            tc3_from_float(x.data(), out, d);
            continue;
        }
        if (layout_of(type).bits) {
            quantise(type, x.data(), d, out);
            continue;
        }
        for (int j = 0; j < d; j++) {
            if (type == row_type::f16) {
                store_half(out + 2 * j, x[j]);
            } else {
                std::memcpy(out + 2 * j, reinterpret_cast<const char *>(&x[j]) + 2, 2);
            }
        }
    }
}

mixedkv::attention_rows rows::view() const {
    mixedkv::attention_rows v;
    v.data     = bytes.data();
    v.type     = type;
    v.row      = row_bytes;
    v.head     = head_bytes;
    v.to_float = type == row_type::other ? bf16_to_float : nullptr;
    return v;
}

std::vector<float> rows::value(int64_t row, int head) const {
    std::vector<float> out(d);
    const uint8_t *    p = bytes.data() + row * row_bytes + head * head_bytes;
    if (type == row_type::other) {
        bf16_to_float(p, out.data(), d);
        return out;
    }
    if (type == row_type::tc3) {
        tc3_to_float(p, out.data(), d);
        return out;
    }
    const auto half = [](const uint8_t * at) { return from_half(uint16_t(at[0] | at[1] << 8)); };
    for (int i = 0; i < d; i++) {
        if (type == row_type::f16) {
            out[i] = half(p + 2 * i);
            continue;
        }
        const int       n     = block_elements(type);
        const uint8_t * block = p + i / n * row_size(type, n);
        out[i]                = half(block) * float(value_of(type, get_integer(type, block, i % n)));
    }
    return out;
}

std::string options::describe() const {
    static const char * const types[] = { "f16", "q8_0", "q4_0", "q5_0", "lm4", "tc3", "other" };
    static const char * const masks[] = { "none", "causal", "window", "holes", "all_hidden", "alibi" };
    char                      text[256];
    std::snprintf(text, sizeof(text),
                  "heads %d/%d d %d/%d queries %d mask %s softcap %g scaled %d pairs %d rotation %d/%d sinks %d "
                  "permuted %d rounding %d "
                  "keys",
                  n_head, n_head_kv, d_k, d_v, n_queries, masks[int(mask)], double(softcap), scaled, n_pairs,
                  rotation_q, rotation_out, sinks, permuted, rounding);
    std::string s = text;
    for (size_t i = 0; i < n_keys.size(); i++) {
        s += " " + std::to_string(n_keys[i]) + ":" + types[int(type_k[i])] + "/" + types[int(type_v[i])];
    }
    return s;
}

static float mask_value(rng & r, mask_kind kind, int64_t query, int64_t n_queries, int64_t key, int64_t n_keys) {
    const int64_t distance = query + n_keys - n_queries - key; // causal, with the queries at the end
    switch (kind) {
    case mask_kind::causal:
        return distance >= 0 ? 0.0f : -INFINITY;
    case mask_kind::window:
        return distance >= 0 && distance < 70 ? 0.0f : -INFINITY;
    case mask_kind::holes:
        return key / 64 % 3 == query % 3 || r.chance(0.3) ? -INFINITY : 0.0f;
    case mask_kind::all_hidden:
        return -INFINITY;
    case mask_kind::alibi:
        return distance >= 0 ? -float(std::min<int64_t>(distance, 2048)) : -INFINITY;
    case mask_kind::none:
        break;
    }
    return 0.0f;
}

problem::problem(rng & r, const options & options) : o(options) {
    for (size_t i = 0; i < o.n_keys.size(); i++) {
        k.emplace_back(r, o.type_k[i], o.n_keys[i], o.n_head_kv, o.d_k, o.permuted ? 6 : 0);
        v.emplace_back(r, o.type_v[i], o.n_keys[i], o.n_head_kv, o.d_v, o.permuted ? 2 : 0);
    }
    q.resize(size_t(o.n_queries) * o.n_head * o.d_k);
    for (float & x : q) {
        x = o.score_std * r.gauss();
    }
    for (int i = 0; o.scaled && i < o.n_head_kv * o.d_k; i++) {
        scale_q.push_back(0.5f + 0.25f * float(i % 5)); // 0.5 to 1.5, others for each head
    }
    for (int h = 0; o.sinks && h < o.n_head; h++) {
        sinks.push_back(2.0f * r.gauss());
    }
    if (o.mask != mask_kind::none) {
        for (int64_t i = 0; i < o.n_queries; i++) {
            for (int64_t j = 0; j < n_keys(); j++) {
                mask.push_back(to_half(mask_value(r, o.mask, i, o.n_queries, j, n_keys())));
            }
        }
    }
    out.assign(size_t(o.n_queries) * o.n_head * o.d_v, NAN);
    make_pairs();
}

// Not drawn from the problem's numbers: these stay as they are
void problem::make_pairs() {
    rng r(o.n_pairs);
    for (int i = 0; i < o.n_pairs; i++) {
        mixedkv::attention_pair pair;
        pair.first  = r.below(o.d_k);
        pair.second = r.chance(0.2) ? pair.first : r.below(o.d_k);
        std::vector<float> subtracted_bias, cosines, sines;
        for (int h = 0; h < o.n_head_kv; h++) {
            const bool whole = pair.first != pair.second;
            const bool any   = r.chance(0.7);
            subtracted_bias.push_back(any ? 5.0f * r.gauss() : 0.0f);
            subtracted_bias.push_back(any && whole ? 5.0f * r.gauss() : 0.0f);
        }
        for (int64_t j = 0; j < first_angle + (o.n_keys[0] + 15) / 16 * 16; j++) {
            const float angle = pair.first == pair.second ? 0.0f : 3.0f * r.gauss();
            cosines.push_back(std::cos(angle));
            sines.push_back(std::sin(angle));
        }
        for (auto & x : { subtracted_bias, cosines, sines }) {
            pair_data.push_back(x);
        }
        pairs.push_back(pair);
    }
    for (size_t i = 0; i < pairs.size(); i++) {
        pairs[i].subtracted_bias = pair_data[3 * i].data();
        pairs[i].cosines         = pair_data[3 * i + 1].data();
        pairs[i].sines           = pair_data[3 * i + 2].data();
    }
}

// of q . k, from the definition
double problem::score_of_pairs(const float * q, int head_kv, int64_t key) const {
    double sum = 0.0;
    for (const auto & pair : pairs) {
        const double c = pair.cosines[first_angle + key], s = pair.sines[first_angle + key];
        const double x = pair.subtracted_bias[2 * head_kv], y = pair.subtracted_bias[2 * head_kv + 1];
        sum += q[pair.first] * (c * x - s * y) + q[pair.second] * (s * x + c * y);
    }
    return sum;
}

int64_t problem::n_keys() const {
    int64_t n = 0;
    for (int64_t s : o.n_keys) {
        n += s;
    }
    return n;
}

mixedkv::attention_args problem::args() {
    mixedkv::attention_args a;
    a.n_head         = o.n_head;
    a.n_head_kv      = o.n_head_kv;
    a.d_k            = o.d_k;
    a.d_v            = o.d_v;
    a.n_queries      = o.n_queries;
    a.q              = q.data();
    a.q_row          = (o.permuted ? 1 : o.n_head) * o.d_k * sizeof(float);
    a.q_head         = (o.permuted ? o.n_queries : 1) * o.d_k * sizeof(float);
    a.n_segments     = int(k.size());
    a.mask           = mask.empty() ? nullptr : mask.data();
    a.mask_row       = n_keys() * sizeof(uint16_t);
    a.scale          = 1.0f / std::sqrt(float(o.d_k));
    a.max_alibi_bias = o.mask == mask_kind::alibi ? 8.0f : 0.0f;
    a.logit_softcap  = o.softcap;
    a.scale_q        = scale_q.empty() ? nullptr : scale_q.data();
    a.rotation_q     = o.rotation_q;
    a.rotation_out   = o.rotation_out;
    a.sinks          = sinks.empty() ? nullptr : sinks.data();
    a.rounding       = o.rounding;
    a.out            = out.data();
    a.out_row        = o.n_head * o.d_v * sizeof(float);
    a.out_head       = o.d_v * sizeof(float);
    for (size_t i = 0; i < k.size(); i++) {
        a.segments[i] = { k[i].view(), v[i].view(), o.n_keys[i] };
    }
    a.segments[0].pairs       = pairs.data();
    a.segments[0].n_pairs     = int(pairs.size());
    a.segments[0].first_angle = first_angle;
    return a;
}

static double slope(const options & o, int head) {
    if (o.mask != mask_kind::alibi) {
        return 1.0;
    }
    const int n = 1 << int(std::floor(std::log2(o.n_head)));
    return head < n ? std::pow(std::pow(2.0, -8.0 / n), head + 1)
                    : std::pow(std::pow(2.0, -4.0 / n), 2 * (head - n) + 1);
}

std::vector<double> rotated(const std::vector<double> & x, int edge) {
    static const std::vector<bool> odd = [] {
        std::vector<bool> res;
        for (int i = 0; i < 1024; i++) {
            res.push_back(std::bitset<10>(i).count() % 2);
        }
        return res;
    }();
    std::vector<double> y(x.size(), 0.0);
    for (size_t i = 0; i < x.size(); i++) {
        const size_t first = i / edge * edge;
        for (int j = 0; j < edge; j++) {
            y[i] += odd[(i - first) & j] ? -x[first + j] : x[first + j];
        }
        y[i] /= std::sqrt(double(edge));
    }
    return y;
}

// In eight sums, which do not wait for each other
static double product(const std::vector<double> & a, const std::vector<float> & b) {
    double sums[8] = {};
    size_t i       = 0;
    for (; i + 8 <= a.size(); i += 8) {
        for (int j = 0; j < 8; j++) {
            sums[j] += a[i + j] * b[i + j];
        }
    }
    for (; i < a.size(); i++) {
        sums[0] += a[i] * b[i];
    }
    return std::accumulate(sums, sums + 8, 0.0);
}

std::vector<double> problem::reference() const {
    std::vector<double> result(out.size(), 0.0);
    const int64_t       n     = n_keys();
    const int           group = o.n_head / o.n_head_kv;
    for (int g = 0; g < o.n_head_kv; g++) {
        std::vector<std::vector<float>> ks, vs;
        for (size_t s = 0; s < k.size(); s++) {
            for (int64_t j = 0; j < o.n_keys[s]; j++) {
                ks.push_back(k[s].value(j, g));
                vs.push_back(v[s].value(j, g));
            }
        }
        for (int row = 0; row < o.n_queries * group; row++) {
            const int           i = row / group;
            const int           h = g * group + row % group;
            const float *       x = q.data() + (o.permuted ? h * o.n_queries + i : i * o.n_head + h) * o.d_k;
            std::vector<double> query(x, x + o.d_k);
            std::vector<double> score(n);
            for (int e = 0; o.scaled && e < o.d_k; e++) {
                query[e] *= scale_q[g * o.d_k + e];
            }
            if (o.rotation_q) {
                query = rotated(query, o.rotation_q);
            }
            double max = sinks.empty() ? -INFINITY : sinks[h];
            for (int64_t j = 0; j < n; j++) {
                const double bias = mask.empty() ? 0.0 : slope(o, h) * from_half(mask[i * n + j]);
                score[j]          = bias;
                if (bias == -INFINITY) {
                    continue;
                }
                double dot = product(query, ks[j]) + (j < o.n_keys[0] ? score_of_pairs(x, g, j) : 0.0);
                dot *= 1.0f / std::sqrt(float(o.d_k)); // the F32 scale of args()
                if (o.softcap != 0.0f) {
                    dot = o.softcap * std::tanh(dot / o.softcap);
                }
                score[j] += dot;
                max = std::max(max, score[j]);
            }
            if (max == -INFINITY) {
                continue;
            }
            double   sum = sinks.empty() ? 0.0 : std::exp(sinks[h] - max);
            double * y   = result.data() + (size_t(i) * o.n_head + h) * o.d_v;
            for (int64_t j = 0; j < n; j++) {
                if (score[j] == -INFINITY) {
                    continue;
                }
                const double p = std::exp(score[j] - max);
                sum += p;
                for (int e = 0; e < o.d_v; e++) {
                    y[e] += p * vs[j][e];
                }
            }
            for (int e = 0; e < o.d_v; e++) {
                y[e] /= sum;
            }
            if (o.rotation_out) {
                const std::vector<double> turned = rotated(std::vector<double>(y, y + o.d_v), o.rotation_out);
                std::copy(turned.begin(), turned.end(), y);
            }
        }
    }
    return result;
}

double worst_error(const std::vector<float> & got, const std::vector<double> & want, size_t n) {
    double worst = 0.0;
    for (size_t i = 0; i < n; i++) {
        const double error = std::fabs(got[i] - want[i]) / 4.0;
        worst              = error <= worst ? worst : error; // NaN stays
    }
    return worst;
}

std::unique_ptr<void, void (*)(void *)> make_scratch(size_t bytes) {
    constexpr std::align_val_t              alignment{ 64 }; // std::aligned_alloc is no part of Windows
    std::unique_ptr<void, void (*)(void *)> scratch(::operator new(bytes, alignment),
                                                    [](void * memory) { ::operator delete(memory, alignment); });
    std::memset(scratch.get(), 0, bytes);
    return scratch;
}

int run(std::vector<mixedkv::attention_args> streams, int n_threads) {
    const int    n     = int(streams.size());
    const size_t bytes = mixedkv::attention_run_bytes(streams.data(), n);
    if (bytes > mixedkv::attention_scratch_bytes(streams.data(), n)) {
        return -1;
    }
    const auto       scratch = make_scratch(bytes); // as promised, so that sanitizers see a write past it
    std::atomic<int> last{ 0 };
    const auto work = [&](int i) { last += mixedkv::attention_run(streams.data(), n, scratch.get(), i, n_threads); };
    std::vector<std::thread> threads;
    for (int i = 1; i < n_threads; i++) {
        threads.emplace_back(work, i);
    }
    work(0);
    for (std::thread & t : threads) {
        t.join();
    }
    return last;
}

bool force_isa(const std::string & name) {
    set_variable("MIXEDKV_ISA", name == "best" ? "" : name.c_str());
    if (const char * error = mixedkv::attention_isa_error()) {
        std::printf("skipped: %s\n", error);
        return false;
    }
    return true;
}

bool force_isa(int argc, char ** argv) {
    const char * name = value_after(argc, argv, "--isa", nullptr);
    return !name || force_isa(name);
}

const char * value_after(int argc, char ** argv, const char * name, const char * otherwise) {
    for (int i = 1; i + 1 < argc; i++) {
        if (std::strcmp(argv[i], name) == 0) {
            return argv[i + 1];
        }
    }
    return otherwise;
}

int number_after(int argc, char ** argv, const char * name, int otherwise) {
    const char * value = value_after(argc, argv, name, nullptr);
    return value ? std::atoi(value) : otherwise;
}

} // namespace test
