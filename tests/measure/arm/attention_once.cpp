// One layer's attention by this package's kernels or by ggml's, on one thread, for counts.py: 16 query heads over 4 KV
// heads of size 128, the queries being the last keys.
//
//   attention_once ours|ggml TYPE KEYS QUERIES REPEATS [ROUNDING]
//
// Prints a few numbers of the output, which are near those of the other one.

#include "attention/attention.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "noise.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr int n_head = 16, n_head_kv = 4, d = 128;

struct type_of {
    const char *      name;
    ggml_type         ggml;
    mixedkv::row_type row;
};

const type_of types[] = { { "q4_0", GGML_TYPE_Q4_0, mixedkv::row_type::q4_0 },
                          { "q8_0", GGML_TYPE_Q8_0, mixedkv::row_type::q8_0 },
                          { "q5_0", GGML_TYPE_Q5_0, mixedkv::row_type::q5_0 },
                          { "f16", GGML_TYPE_F16, mixedkv::row_type::f16 } };

// [keys, n_head_kv, d]
std::vector<char> random_rows(ggml_type type, int64_t keys, uint32_t seed) {
    const int64_t      row = n_head_kv * d;
    std::vector<float> values(row);
    std::vector<char>  out(keys * ggml_row_size(type, row));
    for (int64_t key = 0; key < keys; key++) {
        for (float & x : values) {
            x = noise(seed);
        }
        ggml_quantize_chunk(type, values.data(), out.data() + key * ggml_row_size(type, row), 0, 1, row, nullptr);
    }
    return out;
}

} // namespace

int main(int argc, char ** argv) {
    if (argc < 6) {
        std::fprintf(stderr, "usage: attention_once ours|ggml TYPE KEYS QUERIES REPEATS [ROUNDING]\n");
        return 2;
    }
    const std::string whose   = argv[1];
    const type_of *   type    = nullptr;
    const int64_t     keys    = std::atoll(argv[3]);
    const int64_t     queries = std::atoll(argv[4]);
    const int         repeats = std::atoi(argv[5]);
    for (const type_of & t : types) {
        type = t.name == std::string(argv[2]) ? &t : type;
    }
    if (!type || keys < 1 || queries < 1 || queries > keys || repeats < 1 || (whose != "ours" && whose != "ggml")) {
        std::fprintf(stderr, "attention_once: ours or ggml, a type of q4_0, q8_0, q5_0 and f16, and queries <= keys\n");
        return 2;
    }
    const size_t      head = ggml_row_size(type->ggml, d);
    std::vector<char> k = random_rows(type->ggml, keys, 1), v = random_rows(type->ggml, keys, 2);

    std::vector<float>    q(queries * n_head * d), out(q.size());
    std::vector<uint16_t> mask(queries * keys, 0);
    uint32_t              seed = 3;
    for (float & x : q) {
        x = 4.0f * noise(seed);
    }
    for (int64_t i = 0; i < queries; i++) {
        for (int64_t j = keys - queries + i + 1; j < keys; j++) {
            mask[i * keys + j] = 0xfc00;
        }
    }
    const float scale = 1.0f / std::sqrt(float(d));
    if (whose == "ours") {
        mixedkv::attention_args a;
        const auto              view = [&](const std::vector<char> & bytes) {
            mixedkv::attention_rows r;
            r.data = bytes.data();
            r.type = type->row;
            r.row  = n_head_kv * head;
            r.head = head;
            return r;
        };
        a.segments[0] = { view(k), view(v), keys };
        a.n_segments  = 1;
        a.n_head      = n_head;
        a.n_head_kv   = n_head_kv;
        a.d_k = a.d_v = d;
        a.n_queries   = queries;
        a.q           = q.data();
        a.q_row = a.out_row = n_head * d * sizeof(float);
        a.q_head = a.out_head = d * sizeof(float);
        a.mask                = mask.data();
        a.mask_row            = keys * sizeof(uint16_t);
        a.scale               = scale;
        a.rounding = argc > 6 ? std::atoi(argv[6]) : type->row == mixedkv::row_type::q4_0 ? 8 : 16; // as a cache has it
        a.out      = out.data();
        std::vector<char> scratch(mixedkv::attention_scratch_bytes(&a, 1) + 64);
        void * aligned = reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
        for (int i = 0; i < repeats; i++) {
            mixedkv::attention_run(&a, 1, aligned, 0, 1);
        }
    } else {
        const size_t   bytes = k.size() + v.size() + 2 * mask.size() + 16 * q.size() + (size_t(64) << 20);
        ggml_context * ctx   = ggml_init({ bytes, nullptr, false });
        ggml_tensor *  tq    = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, d, n_head, queries);
        ggml_tensor *  tk    = ggml_new_tensor_3d(ctx, type->ggml, d, n_head_kv, keys);
        ggml_tensor *  tv    = ggml_new_tensor_3d(ctx, type->ggml, d, n_head_kv, keys);
        ggml_tensor *  tm    = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, keys, queries);
        std::memcpy(tq->data, q.data(), q.size() * sizeof(float));
        std::memcpy(tk->data, k.data(), k.size());
        std::memcpy(tv->data, v.data(), v.size());
        std::memcpy(tm->data, mask.data(), mask.size() * 2);
        const auto    turned = [&](ggml_tensor * t) { return ggml_permute(ctx, t, 0, 2, 1, 3); };
        ggml_tensor * res    = ggml_flash_attn_ext(ctx, turned(tq), turned(tk), turned(tv), tm, scale, 0.0f, 0.0f);
        ggml_cgraph * graph  = ggml_new_graph(ctx);
        ggml_build_forward_expand(graph, res);
        for (int i = 0; i < repeats; i++) {
            ggml_graph_compute_with_ctx(ctx, graph, 1);
        }
        std::memcpy(out.data(), res->data, out.size() * sizeof(float));
    }
    std::printf("%s", whose == "ours" ? mixedkv::attention_isa() : "ggml");
    for (size_t i = 0; i < 4; i++) {
        std::printf(" %.5f", double(out[i * (out.size() / 4) + 5]));
    }
    std::printf("\n");
}
