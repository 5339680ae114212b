// Attention of a Vulkan device over cold rows, ring and ubatch as they lie, against double precision over the same
// rows. Mesa's lavapipe is such a device (docs/platforms.md). Prints the error of each case.
//   test_in_place [FIRST LAST]

#include "check.h"
#include "graph/in-place.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int no_device = 77; // ctest counts it as skipped

struct attention_case {
    int64_t   d_k = 64, d_v = 64, n_head = 4, n_head_kv = 2;
    ggml_type type_k = GGML_TYPE_Q4_0, type_v = GGML_TYPE_Q4_0;
    int64_t   n_kv = 256, n_ring = 40, n_tokens = 1, n_stream = 1;
    float     max_bias = 0.0f, logit_softcap = 0.0f;
    bool      has_sinks = false;
    double    visible   = 0.4; // of all pairs; 0: causal, with a window that the ring has
    int64_t   n_queries = 0;   // of each node; 0: as the cache cuts them
    int64_t   every     = 1;   // one of so many outputs of a head is compared

    std::string name() const {
        std::string res = "heads of " + std::to_string(d_k) + "/" + std::to_string(d_v) + ", " +
                          std::to_string(n_head) + " over " + std::to_string(n_head_kv) + ", " +
                          ggml_type_name(type_k) + "/" + ggml_type_name(type_v) + ", " + std::to_string(n_kv) + "+" +
                          std::to_string(n_ring) + "+" + std::to_string(n_tokens) + " keys";
        res += n_stream > 1 ? ", " + std::to_string(n_stream) + " streams" : "";
        res += n_queries > 0 ? ", cut by " + std::to_string(n_queries) : "";
        res += max_bias > 0 ? ", ALiBi" : "";
        res += logit_softcap > 0 ? ", soft cap" : "";
        return res + (has_sinks ? ", sinks" : "");
    }
};

// Rows [n_heads*d] of one tensor, as stored and as read back
struct rows {
    std::vector<uint8_t> stored;
    std::vector<float>   read;
};

class problem {
  public:
    explicit problem(const attention_case & c) : c(c), random(1234) {
        const int64_t n_rows = c.n_tokens * c.n_stream;

        q      = normal(c.d_k * c.n_head * n_rows, 1.0f);
        cold_k = make(c.type_k, c.d_k, c.n_kv * c.n_stream);
        cold_v = make(c.type_v, c.d_v, c.n_kv * c.n_stream);
        ring_k = make(GGML_TYPE_F16, c.d_k, c.n_ring * c.n_stream);
        ring_v = make(GGML_TYPE_F16, c.d_v, c.n_ring * c.n_stream);
        cur_k  = make(GGML_TYPE_F16, c.d_k, n_rows);
        cur_v  = make(GGML_TYPE_F16, c.d_v, n_rows);
        sinks  = normal(c.n_head, 2.0f);
        n_mask = GGML_PAD(n_keys(), 256);
        make_mask();
    }

    int64_t n_keys() const { return c.n_kv + c.n_ring + c.n_tokens; }
    float   scale() const { return 1.0f / std::sqrt(float(c.d_k)); }

    // [d_v, n_head, n_tokens, n_stream]; outputs that are not compared are 0
    std::vector<double> exact() const {
        std::vector<double> res(c.d_v * c.n_head * c.n_tokens * c.n_stream);
        for (int64_t i = 0; i < c.n_head * c.n_tokens * c.n_stream; i += c.every) {
            attend(i % c.n_head, i / c.n_head % c.n_tokens, i / c.n_head / c.n_tokens, res.data() + i * c.d_v);
        }
        return res;
    }

    const attention_case c;

    std::vector<float>       q, sinks;
    rows                     cold_k, cold_v, ring_k, ring_v, cur_k, cur_v;
    std::vector<ggml_fp16_t> mask; // [n_mask, n_tokens, 1, n_stream]
    int64_t                  n_mask = 0;

  private:
    std::mt19937 random;

    std::vector<float> normal(int64_t n, float size) {
        std::normal_distribution<float> draw(0.0f, size);
        std::vector<float>              res(n);
        for (float & x : res) {
            x = draw(random);
        }
        return res;
    }

    rows make(ggml_type type, int64_t d, int64_t n) {
        const auto f32 = normal(d * c.n_head_kv * n, 1.0f);

        rows res;
        res.stored.resize(ggml_row_size(type, d * c.n_head_kv) * n);
        res.read.resize(f32.size());
        ggml_quantize_chunk(type, f32.data(), res.stored.data(), 0, n, d * c.n_head_kv, nullptr);
        ggml_get_type_traits(type)->to_float(res.stored.data(), res.read.data(), f32.size());
        return res;
    }

    // What a query sees of one tensor may be nothing, and one query sees nothing at all. The last of the ring's rows is
    // never seen, as is what pads the mask.
    void make_mask() {
        std::uniform_real_distribution<double> draw(0.0, 1.0);

        mask.assign(n_mask * c.n_tokens * c.n_stream, ggml_fp32_to_fp16(-std::numeric_limits<float>::infinity()));
        for (int64_t i = 0; i < c.n_tokens * c.n_stream; ++i) {
            for (int64_t key = 0; key < n_keys(); ++key) {
                if (is_seen(i % c.n_tokens, key, draw(random)) && (i != 1 || c.n_tokens < 3)) {
                    mask[i * n_mask + key] = ggml_fp32_to_fp16(c.max_bias > 0 ? -float(key % 97) : 0.0f);
                }
            }
        }
    }

    bool is_seen(int64_t token, int64_t key, double x) const {
        const int64_t in_ring = key - c.n_kv, in_cur = in_ring - c.n_ring;
        if (in_ring == c.n_ring - 1) {
            return false;
        }
        if (c.visible == 0) {
            return in_cur < 0 ? in_ring >= token % c.n_ring || key < c.n_kv - 64 : in_cur <= token;
        }
        // some queries see one tensor alone, and whole blocks of cold rows are hidden from all
        const bool hides = token % 5 == 2 ? in_ring >= 0 : token % 5 == 3 ? in_ring < 0 : key >= 64 && key < 128;
        return !hides && (x < c.visible || key == 0);
    }

    const float * row(bool is_k, int64_t s, int64_t key) const {
        const int64_t n = (is_k ? c.d_k : c.d_v) * c.n_head_kv;
        if (key < c.n_kv) {
            return (is_k ? cold_k : cold_v).read.data() + (s * c.n_kv + key) * n;
        }
        key -= c.n_kv;
        if (key < c.n_ring) {
            return (is_k ? ring_k : ring_v).read.data() + (s * c.n_ring + key) * n;
        }
        return (is_k ? cur_k : cur_v).read.data() + (s * c.n_tokens + key - c.n_ring) * n;
    }

    double slope(int64_t head) const {
        const double n = std::pow(2.0, std::floor(std::log2(double(c.n_head))));
        return c.max_bias == 0 ? 1.0
               : head < n      ? std::pow(2.0, -c.max_bias / n * (head + 1))
                               : std::pow(2.0, -c.max_bias / 2 / n * (2 * (head - n) + 1));
    }

    void attend(int64_t head, int64_t token, int64_t s, double * out) const {
        const float * query   = q.data() + ((s * c.n_tokens + token) * c.n_head + head) * c.d_k;
        const int64_t head_kv = head / (c.n_head / c.n_head_kv);

        std::vector<double> weight(n_keys(), 0.0);
        double              most = c.has_sinks ? sinks[head] : -std::numeric_limits<double>::infinity();
        for (const bool exps : { false, true }) {
            for (int64_t key = 0; key < n_keys(); ++key) {
                const float seen = ggml_fp16_to_fp32(mask[(s * c.n_tokens + token) * n_mask + key]);
                if (std::isinf(seen)) {
                    continue;
                }
                if (exps) {
                    weight[key] = std::exp(weight[key] - most);
                    continue;
                }
                const float * k = row(true, s, key) + head_kv * c.d_k;
                double        x = 0;
                for (int64_t j = 0; j < c.d_k; ++j) {
                    x += double(query[j]) * k[j];
                }
                x *= scale();
                x           = c.logit_softcap > 0 ? c.logit_softcap * std::tanh(x / c.logit_softcap) : x;
                weight[key] = x + slope(head) * seen;
                most        = std::max(most, weight[key]);
            }
        }

        double sum = c.has_sinks ? std::exp(sinks[head] - most) : 0.0;
        for (int64_t key = 0; key < n_keys(); ++key) {
            if (weight[key] == 0.0) {
                continue;
            }
            sum += weight[key];
            for (int64_t j = 0; j < c.d_v; ++j) {
                out[j] += weight[key] * row(false, s, key)[head_kv * c.d_v + j];
            }
        }
        for (int64_t j = 0; j < c.d_v && sum > 0; ++j) {
            out[j] /= sum;
        }
    }
};

class device {
  public:
    device() {
        for (size_t i = 0; i < ggml_backend_dev_count() && !dev; ++i) {
            ggml_backend_dev_t one = ggml_backend_dev_get(i);
            dev = std::string(ggml_backend_reg_name(ggml_backend_dev_backend_reg(one))) == "Vulkan" ? one : nullptr;
        }
    }

    explicit    operator bool() const { return dev != nullptr; }
    std::string name() const { return ggml_backend_dev_description(dev); }

    ggml_backend_dev_t get() const { return dev; }

    // RMS of the difference from double precision by RMS of that
    double error(const problem & p) const { return distance(compute(p), p.exact(), p.c.d_v, p.c.every); }

  private:
    ggml_backend_dev_t dev = nullptr;

    static double distance(const std::vector<float> & got, const std::vector<double> & want, int64_t d, int64_t every) {
        double far = 0, size = 0;
        for (int64_t i = 0; i < int64_t(want.size()); i += i % d == d - 1 ? 1 + (every - 1) * d : 1) {
            far += (got[i] - want[i]) * (got[i] - want[i]);
            size += want[i] * want[i];
        }
        return std::sqrt(far / size); // NaN fails each comparison
    }

    std::vector<float> compute(const problem & p) const {
        const auto & c = p.c;

        // One for each case: lavapipe 22.3 touches what descriptors of an earlier case point at, see docs/decisions/127
        ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
        CHECK(backend);
        ggml_context_ptr ctx_ptr(ggml_init({ 256 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
        ggml_context *   ctx = ctx_ptr.get();

        // as a cache has them: rows of all heads, then views of heads
        const auto stored = [&](ggml_type type, int64_t d, int64_t n) {
            return ggml_new_tensor_3d(ctx, type, d * c.n_head_kv, n, c.n_stream);
        };
        const auto heads = [&](ggml_tensor * t, int64_t d) {
            return ggml_view_4d(ctx, t, d, c.n_head_kv, t->ne[1], t->ne[2], ggml_row_size(t->type, d), t->nb[1],
                                t->nb[2], 0);
        };
        ggml_tensor * q     = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, c.d_k, c.n_head, c.n_tokens * c.n_stream);
        ggml_tensor * mask  = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, p.n_mask, c.n_tokens, 1, c.n_stream);
        ggml_tensor * sinks = c.has_sinks ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, c.n_head) : nullptr;

        std::vector<std::pair<ggml_tensor *, const std::vector<uint8_t> *>> data;
        const auto add = [&](const rows & from, ggml_type type, int64_t d, int64_t n) {
            data.push_back({ stored(type, d, n), &from.stored });
            return data.back().first;
        };

        llama_kv_in_place_inputs in;
        in.q      = q;
        in.cold_k = heads(add(p.cold_k, c.type_k, c.d_k, c.n_kv), c.d_k);
        in.cold_v = heads(add(p.cold_v, c.type_v, c.d_v, c.n_kv), c.d_v);
        in.ring_k = heads(add(p.ring_k, GGML_TYPE_F16, c.d_k, c.n_ring), c.d_k);
        in.ring_v = heads(add(p.ring_v, GGML_TYPE_F16, c.d_v, c.n_ring), c.d_v);
        in.cur_k  = ggml_reshape_3d(ctx, add(p.cur_k, GGML_TYPE_F16, c.d_k, c.n_tokens), c.d_k, c.n_head_kv,
                                    c.n_tokens * c.n_stream);
        in.cur_v  = ggml_reshape_3d(ctx, add(p.cur_v, GGML_TYPE_F16, c.d_v, c.n_tokens), c.d_v, c.n_head_kv,
                                    c.n_tokens * c.n_stream);

        const int64_t n_most = llama_kv_in_place_queries(c.n_tokens, p.n_keys(), c.n_stream, c.n_head, c.d_v);
        const int64_t n_cut  = c.n_queries > 0 ? c.n_queries : n_most;

        in.masks         = llama_kv_in_place_masks(ctx, mask, c.n_kv, c.n_ring, n_cut);
        in.sinks         = sinks;
        in.scale         = p.scale();
        in.max_bias      = c.max_bias;
        in.logit_softcap = c.logit_softcap;

        std::vector<ggml_tensor *> nodes;
        ggml_tensor *              res = llama_kv_in_place_attention(ctx, in, nodes);

        ggml_cgraph * graph = ggml_new_graph(ctx);
        ggml_build_forward_expand(graph, res);
        ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx, backend.get()));
        CHECK(buffer);
        for (const ggml_tensor * node : nodes) {
            CHECK(ggml_backend_dev_supports_op(dev, node));
        }

        ggml_backend_tensor_set(q, p.q.data(), 0, ggml_nbytes(q));
        ggml_backend_tensor_set(mask, p.mask.data(), 0, ggml_nbytes(mask));
        if (sinks) {
            ggml_backend_tensor_set(sinks, p.sinks.data(), 0, ggml_nbytes(sinks));
        }
        for (const auto & [tensor, bytes] : data) {
            ggml_backend_tensor_set(tensor, bytes->data(), 0, bytes->size());
        }
        CHECK(ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS);

        std::vector<float> out(ggml_nelements(res));
        ggml_backend_tensor_get(res, out.data(), 0, ggml_nbytes(res));
        return out;
    }
};

std::vector<attention_case> all_cases() {
    std::vector<attention_case> res;

    const auto add = [&](auto change) {
        attention_case c;
        change(c);
        res.push_back(c);
    };

    // each kind of step and of attention first: by groups of heads up to 8 tokens, and each head alone
    for (const int64_t n : { 1, 5, 70 }) {
        add([&](attention_case & c) { c.n_tokens = n; });
        add([&](attention_case & c) {
            c.n_stream = 3;
            c.n_tokens = n;
        });
        add([&](attention_case & c) {
            c.has_sinks = true;
            c.n_tokens  = n;
        });
        add([&](attention_case & c) {
            c.max_bias = 8.0f;
            c.n_head   = 6;
            c.n_tokens = n;
        });
        add([&](attention_case & c) {
            c.visible  = 0;
            c.n_tokens = n;
            c.n_kv     = 512;
        });
    }
    for (const int64_t n : { 1, 5 }) {
        add([&](attention_case & c) {
            c.n_kv     = 8192;
            c.n_tokens = n;
            c.n_ring   = 520;
        }); // many splits
    }
    // on a device with 128 cores or more the ring's splits take more than a byte; lavapipe counts as one with 16
    add([&](attention_case & c) {
        c.n_head = c.n_head_kv = 1;
        c.n_tokens             = 1;
        c.n_ring               = 16392;
        c.visible              = 0.05;
    });
    // more heads and streams than cores: llama.cpp does not split
    add([&](attention_case & c) {
        c.n_head    = 16;
        c.n_head_kv = 8;
        c.n_stream  = 5;
    });
    for (const int64_t n : { 1, 70 }) {
        add([&](attention_case & c) {
            c.logit_softcap = 5.0f;
            c.has_sinks     = true;
            c.n_stream      = 2;
            c.n_tokens      = n;
        });
        add([&](attention_case & c) {
            c.n_head    = 8;
            c.n_head_kv = 8;
            c.n_tokens  = n;
        });
        add([&](attention_case & c) {
            c.n_head    = 8;
            c.n_head_kv = 1;
            c.n_tokens  = n;
        });
    }
    // micro-batches that are cut
    for (const int64_t n_stream : { 1, 3 }) {
        add([&](attention_case & c) {
            c.n_queries = 128;
            c.n_tokens  = 300;
            c.n_stream  = n_stream;
            c.has_sinks = true;
        });
    }
    // each shader is compiled for a head size and its types
    for (const int64_t d : { 64, 96, 128, 256 }) {
        for (const ggml_type type : { GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, GGML_TYPE_F16, GGML_TYPE_Q5_0 }) {
            for (const int64_t n : { 1, 70 }) {
                add([&](attention_case & c) {
                    c.d_k = c.d_v = d;
                    c.type_k = c.type_v = type;
                    c.n_tokens          = n;
                });
            }
        }
    }
    add([](attention_case & c) { c.type_k = GGML_TYPE_Q8_0; });
    add([](attention_case & c) {
        c.d_k      = 192;
        c.d_v      = 128;
        c.n_tokens = 3;
    });
    add([](attention_case & c) {
        c.d_k = c.d_v = 80;
        c.type_k = c.type_v = GGML_TYPE_F16;
        c.n_tokens          = 9;
    });
    // more than lavapipe binds: the cache cuts it
    add([](attention_case & c) {
        c.d_k = c.d_v = 256;
        c.n_head      = 128;
        c.n_head_kv   = 2;
        c.n_tokens    = 340;
        c.every       = 997;
    });
    return res;
}

bool is_refused(int64_t n_tps, int64_t n_keys, int64_t n_stream, int64_t n_head, int64_t d_v) {
    try {
        llama_kv_in_place_queries(n_tps, n_keys, n_stream, n_head, d_v);
        return false;
    } catch (const std::runtime_error & err) {
        return std::string(err.what()).find("use a smaller n_ubatch") != std::string::npos;
    }
}

} // namespace

int main(int argc, char ** argv) {
#ifndef _WIN32
    setenv("GGML_VK_VISIBLE_DEVICES", "0", 0); // llama.cpp leaves devices in software out otherwise
#endif
    const device gpu;
    if (!gpu) {
        printf("skipped: no Vulkan device, or no Vulkan in this build (docs/platforms.md)\n");
        return no_device;
    }
    printf("%s\n", gpu.name().c_str());

    // what is bound at once of a micro-batch: the mask of a long context, and the splits of many heads
    CHECK(llama_kv_in_place_queries(2048, 131072, 1, 32, 128) == 512);
    CHECK(llama_kv_in_place_queries(2048, 4096, 1, 32, 256) == 1280);
    CHECK(llama_kv_in_place_queries(2048, 4096, 4, 32, 256) == 256);
    CHECK(llama_kv_in_place_queries(70, 4096, 1, 32, 256) == 70);
    CHECK(llama_kv_in_place_queries(80, 4096, 4, 128, 256) == 80);
    CHECK(is_refused(128, 4096, 4, 128, 256));   // not even 128 queries
    CHECK(is_refused(8192, 131072, 1, 32, 128)); // sixteen nodes a layer

    const auto   cases = all_cases();
    const size_t first = argc > 2 ? size_t(atoi(argv[1])) : 0;
    const size_t last  = argc > 2 ? std::min(size_t(atoi(argv[2])), cases.size() - 1) : cases.size() - 1;
    for (size_t i = first; i <= last; ++i) {
        const auto & c     = cases[i];
        const double error = gpu.error(problem(c));
        printf("%.1e  %s\n", error, c.name().c_str());
        fflush(stdout);
        CHECK(error < 4e-3); // of products in F16
    }
    return 0;
}
