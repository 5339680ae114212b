#include "graph/node.h"

#include "graph/guard.h"

#include "attention/attention.h"
#include "attention/cuda/node_params.h"
#include "attention/lm4.h"
#include "attention/sparse/mass.h"
#include "attention/tc3.h"
#include "attention/thread_memory.h"

#include "ggml-cpp.h"
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" // clang counts what the header has
#include "ggml-impl.h"
#pragma GCC diagnostic pop

#include <algorithm>
#include <cstring>
#include <string>

using mixedkv::attention_args;
using mixedkv::attention_rows;
using mixedkv::attention_segment;
using mixedkv::row_type;

static_assert(sizeof(ggml_custom_op_params) <= mixedkv::cuda::node_params_offset &&
        mixedkv::cuda::node_params_offset + sizeof(mixedkv::cuda::node_params) <= GGML_MAX_OP_PARAMS,
        "a device's parameters lie behind ggml's own");

static constexpr size_t  SCRATCH_ALIGN = 64;
static constexpr int64_t SPARSE_DEPTH  = 1024; // keys on whole strips, of which choosing costs less than reading all

void * llama_kv_scratch::get() {
    const uintptr_t p = (uintptr_t) data.data();
    return (void *) ((p + SCRATCH_ALIGN - 1) & ~(uintptr_t) (SCRATCH_ALIGN - 1));
}

void llama_kv_scratch::reserve(size_t size) {
    if (data.size() < size + SCRATCH_ALIGN) {
        data.assign(size + SCRATCH_ALIGN, 0);
    }
}

void llama_kv_scratch::next_mask() {
    if (++n_masks >= 1u << 24) {
        std::fill(seen.begin(), seen.end(), 0);
        n_masks = 1;
    }
}

void llama_kv_scratch::reserve_seen(size_t n) {
    seen.resize(std::max(seen.size(), n));
}

mixedkv::attention_seen llama_kv_scratch::get_seen(size_t first, size_t n, int64_t row) {
    mixedkv::attention_seen res;
    if (n_masks > 0 && n > 0 && first + n <= seen.size()) {
        res = { seen.data() + first, row, n_masks };
    }
    return res;
}

static int64_t count_keys(const attention_args & a) {
    int64_t res = 0;
    for (int i = 0; i < a.n_segments; ++i) {
        res += a.segments[i].n;
    }
    return res;
}

static bool is_decode(const attention_args & a) {
    return a.n_queries*(a.n_head/a.n_head_kv) <= mixedkv::attention_decode_rows;
}

// Of all streams; none where the ubatch is not decode alone
static size_t count_seen(const attention_args & a, int64_t n_stream) {
    return is_decode(a) ? n_stream*mixedkv::attention_seen_blocks(count_keys(a))*a.n_queries : 0;
}

row_type llama_kv_node_row_type(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F16:  return row_type::f16;
        case GGML_TYPE_Q8_0: return row_type::q8_0;
        case GGML_TYPE_Q4_0: return row_type::q4_0;
        case GGML_TYPE_Q5_0: return row_type::q5_0;
        default:             return type == LM4_TYPE ? row_type::lm4 : type == TC3_TYPE ? row_type::tc3 : row_type::other;
    }
}

static void copy_f32(const void * row, float * out, int64_t n) {
    memcpy(out, row, n*sizeof(float));
}

// t: [n_embd_head, n_head_kv, n_rows, n_stream]
static attention_rows to_rows(const ggml_tensor * t, int64_t strm) {
    attention_rows res;
    res.data     = (const char *) t->data + strm*t->nb[3];
    res.type     = llama_kv_node_row_type(t->type);
    res.row      = t->nb[2];
    res.head     = t->nb[1];
    res.to_float = t->type == GGML_TYPE_F32 ? copy_f32 : ggml_get_type_traits(t->type)->to_float;
    return res;
}

attention_rows llama_kv_node_rows(const ggml_tensor * cold_k, int64_t n_embd_head) {
    attention_rows res;
    res.data     = cold_k->data;
    res.type     = llama_kv_node_row_type(cold_k->type);
    res.row      = cold_k->nb[1];
    res.head     = ggml_row_size(cold_k->type, n_embd_head);
    res.to_float = ggml_get_type_traits(cold_k->type)->to_float;
    return res;
}

static attention_segment to_segment(const ggml_tensor * k, const ggml_tensor * v, int64_t strm) {
    attention_segment res;
    res.k = to_rows(k, strm);
    res.v = to_rows(v, strm);
    res.n = k->ne[2];
    return res;
}

// The rows of the ubatch, K and V side by side unless V is in K
static attention_segment to_segment(const ggml_tensor * cur, const attention_args & a, bool is_latent, int64_t strm, int64_t n_tps) {
    attention_segment res;
    res.k.data = (const char *) cur->data + strm*n_tps*cur->nb[1];
    res.k.row  = cur->nb[1];
    res.k.head = a.d_k*sizeof(ggml_fp16_t);
    res.v      = res.k;
    res.n      = n_tps;
    if (!is_latent) {
        res.v.data = (const char *) res.k.data + a.n_head_kv*res.k.head;
        res.v.head = a.d_v*sizeof(ggml_fp16_t);
    }
    return res;
}

// of a view of some streams: [n_embd_gqa, n_cells, n_stream]
static int64_t first_stream(const ggml_tensor * k) {
    return ((const char *) k->data - (const char *) k->view_src->data)/k->view_src->nb[2];
}

// Rows of 4 or 5 bits are off by far more than what is multiplied with them in 8 bits. See docs/decisions/066.
static int suitable_rounding(const ggml_tensor * k, const ggml_tensor * v) {
    const auto is_coarse = [](const ggml_tensor * t) { return 8*int64_t(ggml_type_size(t->type)) <= 6*ggml_blck_size(t->type); };
    return is_coarse(k) && is_coarse(v) ? 8 : 16;
}

// sources of the node; those of the ring where it has one, then the sinks and the choice of pages where there are such
enum source { SRC_Q, SRC_COLD_K, SRC_COLD_V, SRC_MASK, N_SRC_COLD, SRC_RING_K = N_SRC_COLD, SRC_RING_V, SRC_CUR, SRC_IDXS, N_SRC_RING };

static void add_segments(attention_args & res, const ggml_tensor * const * src, const llama_kv_node & node, int64_t strm) {
    const ggml_tensor * k = src[SRC_COLD_K];

    res.segments[res.n_segments++] = to_segment(k, src[SRC_COLD_V], strm);
    if (node.pairs) {
        auto & cold = res.segments[0];
        cold.pairs       = node.pairs->data();
        cold.n_pairs     = (int) node.pairs->size();
        cold.first_angle = ((const char *) cold.k.data - (const char *) k->view_src->data)/k->nb[2];
    }
    if (node.has_ring) {
        res.segments[res.n_segments++] = to_segment(src[SRC_RING_K], src[SRC_RING_V], strm);
        res.segments[res.n_segments++] = to_segment(src[SRC_CUR], res, node.is_latent, strm, res.n_queries);
    }
}

static void set_pages(attention_args & res, const llama_kv_node & node, int64_t strm) {
    res.page_counts = &node.scratch.page_counts;
    if (!node.pages) {
        return;
    }
    const auto &  pages = *node.pages;
    const int64_t first = strm*node.all_pages->get_n_strips();

    res.pages.bits   = pages.get_bits(first);
    res.pages.steps  = pages.get_steps(first);
    res.pages.strips = pages.n_strips;
    res.pages.known  = node.all_pages->get_known(0) + first;
    res.pages.error  = node.scratch.page_error;
    res.pages.depth  = SPARSE_DEPTH;
}

static attention_args to_args(const ggml_tensor * dst, const llama_kv_node & node, int64_t strm) {
    const ggml_tensor * const * src = dst->src;

    const ggml_tensor * q    = src[SRC_Q];
    const ggml_tensor * k    = src[SRC_COLD_K];
    const ggml_tensor * v    = src[SRC_COLD_V];
    const ggml_tensor * mask = src[SRC_MASK];

    attention_args res;
    res.n_head    = q->ne[1];
    res.n_head_kv = k->ne[1];
    res.d_k       = k->ne[0];
    res.d_v       = v->ne[0];
    res.n_queries = q->ne[2]/k->ne[3];

    res.q      = (const float *) ((const char *) q->data + strm*res.n_queries*q->nb[2]);
    res.q_row  = q->nb[2];
    res.q_head = q->nb[1];

    add_segments(res, src, node, strm);
    if (strm < (int64_t) node.scratch.orders.size()) {
        res.order = node.scratch.orders[strm].get();
    }

    res.mask     = (const uint16_t *) ((const char *) mask->data + strm*mask->nb[3]);
    res.mask_row = mask->nb[1];

    const size_t n_seen = count_seen(res, 1);
    res.seen = node.scratch.get_seen(strm*n_seen, n_seen, res.n_queries);

    res.rounding = node.scratch.rounding > 0 ? node.scratch.rounding : suitable_rounding(k, v);

    set_pages(res, node, first_stream(k) + strm);

    res.scale_q      = node.scales ? node.scales->q.data() : nullptr;
    res.rotation_q   = node.rotation_k;
    res.rotation_out = node.rotation_v;

    res.scale          = node.scale;
    res.max_alibi_bias = node.max_bias;
    res.logit_softcap  = node.logit_softcap;
    res.sinks          = node.has_sinks ? (const float *) src[node.has_ring ? N_SRC_RING : N_SRC_COLD]->data : nullptr;

    res.out      = (float *) ((char *) dst->data + strm*res.n_queries*dst->nb[1]);
    res.out_row  = dst->nb[1];
    res.out_head = res.d_v*sizeof(float);

    return res;
}

static attention_args cut(const attention_args & whole, int64_t first, int64_t n) {
    attention_args res = whole;
    res.n_queries = n;
    res.q         = (const float *) ((const char *) whole.q + first*whole.q_row);
    res.mask      = (const uint16_t *) ((const char *) whole.mask + first*whole.mask_row);
    res.out       = (float *) ((char *) whole.out + first*whole.out_row);
    if (res.order.mask) {
        res.order.mask += first*whole.order.mask_row/sizeof(uint16_t);
    }
    if (res.order.readers) {
        res.order.readers += first;
    }
    if (res.seen.blocks) {
        res.seen.blocks += first;
    }
    return res;
}

// One token each of many answers beside a slice of a prompt: together all of them would be worked on as the prompt is,
// which dequantises every key of every answer for a row or two. So runs of few rows are gathered to calls of few rows, and
// what lies between them to others.
static void cut(const attention_args & whole, const std::vector<int64_t> & runs, std::vector<attention_args> & res) {
    const int64_t most = mixedkv::attention_decode_rows/(whole.n_head/whole.n_head_kv);

    int64_t first = 0;
    int64_t n     = 0;
    bool    decode   = false;
    for (const int64_t run : runs) {
        if (n > 0 && (decode != (run <= most) || (decode && n + run > most))) {
            res.push_back(cut(whole, first, n));
            first += n;
            n = 0;
        }
        decode = run <= most;
        n += run;
    }
    res.push_back(cut(whole, first, n));
}

static void to_args(const ggml_tensor * dst, const llama_kv_node & node, std::vector<attention_args> & res) {
    res.clear();
    for (int64_t strm = 0; strm < dst->src[SRC_COLD_K]->ne[3]; ++strm) {
        res.push_back(to_args(dst, node, strm));
    }
}

// Answers that go on by a token each may leave pages out. Several tokens of one sequence share what they read, and read
// all. Who chooses and who reads give each query the same place.
static void place_choices(std::vector<attention_args> & calls, const llama_kv_node & node) {
    const auto & runs = node.scratch.runs;

    size_t offset = 0;
    size_t i_run  = 0;
    for (auto & a : calls) {
        bool single = !runs.empty() || a.n_queries == 1;
        for (int64_t n = 0; n < a.n_queries && i_run < runs.size(); n += runs[i_run++]) {
            single &= runs[i_run] == 1;
        }
        a.pages.row = mixedkv::attention_taken_bytes(a.segments[0].n, a.n_head_kv);

        const size_t n = a.n_queries*a.pages.row;
        if (node.pages && single && is_decode(a) && offset + n <= node.scratch.taken.size()) {
            a.pages.taken = node.scratch.taken.data() + offset;
            offset += n;
        }
    }
}

static const std::vector<attention_args> & to_calls(const ggml_tensor * dst, const llama_kv_node & node) {
    auto & res = mixedkv::thread_memory<std::vector<attention_args>, struct to_calls_tag>();

    to_args(dst, node, res);

    const auto & runs = node.scratch.runs;
    if (runs.size() > 1) {
        const attention_args whole = res[0];

        res.clear();
        cut(whole, runs, res);
        // what a context has for its largest ubatch; not what it has grown to since, or bits would depend on that
        if (mixedkv::attention_run_bytes(res.data(), (int) res.size()) > node.cut_bytes) {
            res.assign(1, whole);
        }
    }
    place_choices(res, node);

    return res;
}

static void add_mass(ggml_tensor * dst, const llama_kv_node & node, int ith, int nth) {
    const attention_args args = to_args(dst, node, 0);

    auto & mass = node.scratch.mass->by_thread[ith];
    mass.resize(std::max<size_t>(mass.size(), args.segments[0].n));

    mixedkv::attention_mass(args, ith, nth, mass.data());
}

static void choose_compute(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const auto & calls = to_calls(dst, *(const llama_kv_node *) userdata);

    mixedkv::attention_choose_pages(calls.data(), (int) calls.size(), ith, nth);
}

static void attention_compute(ggml_tensor * dst, int ith, int nth, void * userdata) {
    auto & node = *(llama_kv_node *) userdata;

    if (node.scratch.mass && node.is_deep) {
        add_mass(dst, node, ith, nth);
    }

    const auto & calls = to_calls(dst, node);

    const bool last = mixedkv::attention_run(calls.data(), (int) calls.size(), node.scratch.get(), ith, nth);

    if (last && node.writes_ring) {
        const ggml_tensor * const * src = dst->src;
        llama_kv_node_write_ring(src[SRC_CUR], src[SRC_IDXS], src[SRC_RING_K]->view_src, node.is_latent ? nullptr : src[SRC_RING_V]->view_src);
    }
}

bool llama_kv_node_runs_on(ggml_backend_dev_t dev, const llama_kv_layer_shape & layer) {
    // a backend that computes elsewhere (RPC) says of any node that it can
    ggml_backend_reg_t reg = dev ? ggml_backend_dev_backend_reg(dev) : nullptr;
    if (!reg || std::string(ggml_backend_reg_name(reg)) != "CUDA") {
        return false;
    }

    ggml_context_ptr ctx_ptr(ggml_init({ 16*ggml_tensor_overhead(), nullptr, true }));
    ggml_context *   ctx = ctx_ptr.get();

    llama_kv_scratch scratch;
    llama_kv_node    node { scratch };
    node.on_device = true;

    const int64_t n_kv = 256;

    ggml_tensor * q    = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, layer.n_embd_head_k, layer.n_head,    1);
    ggml_tensor * k    = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, layer.n_embd_head_k, layer.n_head_kv, 1);
    ggml_tensor * v    = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, layer.n_embd_head_v, layer.n_head_kv, 1);
    ggml_tensor * idxs = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, 1);
    ggml_tensor * mask = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, n_kv, 1);

    ggml_tensor * rows_k = ggml_new_tensor_2d(ctx, layer.type_k, layer.n_embd_head_k*layer.n_head_kv, n_kv);
    ggml_tensor * rows_v = ggml_new_tensor_2d(ctx, layer.type_v, layer.n_embd_head_v*layer.n_head_kv, n_kv);

    const auto heads = [&](ggml_tensor * rows, int64_t n_embd_head) {
        return ggml_view_4d(ctx, rows, n_embd_head, layer.n_head_kv, n_kv, 1,
                ggml_row_size(rows->type, n_embd_head), rows->nb[1], rows->nb[2], 0);
    };

    ggml_tensor * choice = nullptr;
    ggml_tensor * stored = llama_kv_node_store(ctx, node, { { k, rows_k, idxs }, { v, rows_v, idxs } });

    llama_kv_attention_inputs in;
    in.q      = q;
    in.cold_k = heads(rows_k, layer.n_embd_head_k);
    in.cold_v = heads(rows_v, layer.n_embd_head_v);
    in.mask   = mask;
    ggml_tensor * attention = llama_kv_node_attention(ctx, node, in, &choice);

    return ggml_backend_dev_supports_op(dev, stored) && ggml_backend_dev_supports_op(dev, attention);
}

bool llama_kv_node_attends(const ggml_tensor * t, const llama_kv_node & node) {
    ggml_custom_op_params params;
    memcpy(&params, t->op_params, sizeof(params));

    return t->op == GGML_OP_CUSTOM && params.fun == attention_compute && params.userdata == &node;
}

static void set_device_params(ggml_tensor * res, const llama_kv_node & node) {
    mixedkv::cuda::node_params params;
    params.magic         = params.magic_number;
    params.is_attention  = true;
    params.rotation_k    = node.rotation_k;
    params.rotation_v    = node.rotation_v;
    params.has_ring      = node.has_ring;
    params.has_sinks     = node.has_sinks;
    params.has_scales    = node.scale_q != nullptr;
    params.writes_ring   = node.writes_ring;
    params.scale         = node.scale;
    params.max_bias      = node.max_bias;
    params.logit_softcap = node.logit_softcap;
    mixedkv::cuda::set_node_params(res->op_params, params);
}

ggml_tensor * llama_kv_node_attention(
        ggml_context * ctx, llama_kv_node & node, const llama_kv_attention_inputs & in, ggml_tensor ** choice) {
    llama_kv_guard(in.q->type == GGML_TYPE_F32 && in.q->nb[0] == sizeof(float), "Q of a token comes as rows of F32");

    node.has_ring  = in.ring_k != nullptr;
    node.has_sinks = in.sinks != nullptr;

    std::vector<ggml_tensor *> srcs = { in.q, in.cold_k, in.cold_v, in.mask };

    if (node.has_ring) {
        srcs.insert(srcs.end(), { in.ring_k, in.ring_v, in.cur, in.idxs });
    }
    if (node.has_sinks) {
        srcs.push_back(in.sinks);
    }

    if (srcs.size() + 1 >= GGML_MAX_SRC) {
        node.pages = nullptr; // no room for one more: a layer with sinks of its own reads all
    }
    if (node.pages) {
        // the sources are those of the attention, so it sees the same calls
        *choice = ggml_custom_4d(ctx, GGML_TYPE_I8, 1, 1, 1, 1, srcs.data(), (int) srcs.size(), choose_compute, GGML_N_TASKS_MAX, &node);
        srcs.push_back(*choice);
    }

    ggml_tensor * res = ggml_custom_4d(ctx, GGML_TYPE_F32, in.cold_v->ne[0]*in.q->ne[1], in.q->ne[2], 1, 1,
            srcs.data(), (int) srcs.size(), attention_compute, GGML_N_TASKS_MAX, &node);

    if (node.on_device) {
        res->src[srcs.size()] = node.scale_q; // one more than ggml_custom_4d takes
        set_device_params(res, node);
        return res;
    }

    // the first graph of a context is the one that llama.cpp reserves memory with: its largest
    std::vector<attention_args> args;
    to_args(res, node, args);
    for (auto & a : args) {
        a.order = {}; // of the step before, if any
        a.order.n_splits = node.most_splits;
        a.order.n_plain  = node.all_pages && !node.all_pages->empty() ? a.segments[0].n : 0;
    }
    const size_t bytes = mixedkv::attention_scratch_bytes(args.data(), (int) args.size());

    node.scratch.reserve(bytes);
    node.scratch.reserve_seen(count_seen(args[0], (int64_t) args.size()));
    node.cut_bytes = node.cut_bytes == 0 ? bytes : node.cut_bytes;

    return res;
}
