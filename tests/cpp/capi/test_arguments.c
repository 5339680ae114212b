// Each argument of each function out of its range: a status and a message, never a crash. The last line names the call.
//
// test_arguments MODEL, one with heads of 256, which every type divides

#include <llama.h>
#include <mixedkv/mixedkv.h>

#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_CTX = 256, N_TOKENS = 48, MAX_LAYERS = 8, MAX_ROW = 4096 };

static int n_failed = 0;

static void expect(int want, int got) {
    const int silent = got != MIXEDKV_OK && mixedkv_last_error()[0] == '\0';
    if (got != want || silent) {
        printf("FAILED, status %d instead of %d%s: %s\n", got, want, silent ? ", no message" : "",
               mixedkv_last_error());
        n_failed++;
    }
}

#define EXPECT(want, call)     \
    do {                       \
        printf("%s\n", #call); \
        expect(want, call);    \
    } while (0)

#define OK            MIXEDKV_OK
#define INVALID       MIXEDKV_INVALID
#define UNSUPPORTED   MIXEDKV_UNSUPPORTED
#define NOT_AVAILABLE MIXEDKV_NOT_AVAILABLE
#define BUSY          MIXEDKV_BUSY

static struct mixedkv_config make_config(uint32_t threshold, uint32_t group_size, uint32_t sink_tokens, int attention) {
    struct mixedkv_config res = { .mixed = true, .threshold = threshold, .group_size = group_size };
    res.sink_tokens           = sink_tokens;
    res.attention             = (enum mixedkv_attention)attention;
    res.n_draft               = 8;
    res.hot_budget            = MIXEDKV_HOT_BUDGET_ALL;
    return res;
}

// --- configuration

static void test_configurations(const struct llama_model * model) {
    const struct {
        struct mixedkv_config config;
        uint32_t              n_ctx;
        enum mixedkv_status   status;
    } cases[] = {
        { make_config(32, 8, 4, 0), N_CTX, OK },
        { make_config(0, 1, 0, 0), 0, OK },
        { make_config(32, 8, 4, 3), N_CTX, INVALID },
        { make_config(32, 8, 4, -1), N_CTX, INVALID },
        { make_config(32, 8, 4, INT_MAX), N_CTX, INVALID },
        { make_config(32, 8, 4, INT_MIN), N_CTX, INVALID },
        { make_config(32, 0, 4, 0), N_CTX, INVALID },
        { make_config(8, 32, 4, 0), N_CTX, INVALID },
        { make_config(32, 8, 4, 0), 35, INVALID },
        { make_config(UINT32_MAX, 8, 4, 0), UINT32_MAX, INVALID },
        { make_config(32, UINT32_MAX, 4, 0), UINT32_MAX, INVALID },
        { make_config(32, 8, UINT32_MAX, 0), UINT32_MAX, INVALID },
        { make_config(UINT32_MAX, UINT32_MAX, UINT32_MAX, 0), UINT32_MAX, INVALID },
        { make_config(INT32_MAX, INT32_MAX, INT32_MAX, 0), N_CTX, INVALID },
        { make_config(INT32_MAX, INT32_MAX, INT32_MAX, 0), UINT32_MAX, OK },
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const struct mixedkv_config c = cases[i].config;
        printf("case %zu: ", i);
        EXPECT((int)cases[i].status, mixedkv_check(model, &c, GGML_TYPE_Q4_0, GGML_TYPE_Q4_0, cases[i].n_ctx));
    }
    const float shares[] = { -1e-6f, 1.0f, INFINITY, NAN };
    for (int i = 0; i < 4; i++) {
        struct mixedkv_config config = make_config(32, 8, 4, 0);
        config.sparse_error          = shares[i];
        EXPECT(INVALID, mixedkv_check(model, &config, GGML_TYPE_Q4_0, GGML_TYPE_Q4_0, N_CTX));
    }
    const struct mixedkv_config good = make_config(32, 8, 4, 0);
    EXPECT(INVALID, mixedkv_check(NULL, &good, GGML_TYPE_Q4_0, GGML_TYPE_Q4_0, N_CTX));
    EXPECT(INVALID, mixedkv_check(model, NULL, GGML_TYPE_Q4_0, GGML_TYPE_Q4_0, N_CTX));

    const struct mixedkv_config bad = make_config(32, 8, 4, 7);
    EXPECT(INVALID, mixedkv_configure_next(&bad));

    const struct {
        struct mixedkv_layer_types layers[2];
        enum mixedkv_status        status; // of mixedkv_check()
    } layered[] = {
        { { { 0, 0, GGML_TYPE_Q8_0, GGML_TYPE_Q5_1 }, { 1, -1, GGML_TYPE_Q4_0, GGML_TYPE_Q8_0 } }, OK },
        { { { 1, -1, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0 }, { 0, 0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_0 } }, OK },
        { { { 0, -1, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0 }, { 1, 1, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0 } }, INVALID },
        { { { 0, 1, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0 }, { 1, 2, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0 } }, INVALID },
        { { { 0, 0, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0 }, { 2, 1, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0 } }, INVALID },
        { { { -1, 0, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0 }, { 1, 1, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0 } }, INVALID },
        { { { 0, 0, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0 }, { 1, 1, GGML_TYPE_Q8_0, 9999 } }, INVALID },
        { { { 0, 0, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0 }, { 1, 1, GGML_TYPE_IQ2_XXS, GGML_TYPE_Q8_0 } }, INVALID },
        { { { 0, 0, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0 }, { 1, 999, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0 } }, UNSUPPORTED },
        { { { 0, 0, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0 }, { INT_MAX, -1, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0 } }, UNSUPPORTED },
    };
    for (size_t i = 0; i < sizeof(layered) / sizeof(layered[0]); i++) {
        struct mixedkv_config c = good;
        c.layers                = layered[i].layers;
        c.n_layers              = 2;
        printf("layers %zu: ", i);
        EXPECT((int)layered[i].status, mixedkv_check(model, &c, GGML_TYPE_Q4_0, GGML_TYPE_Q4_0, N_CTX));
        EXPECT(layered[i].status == INVALID ? INVALID : OK, mixedkv_configure_next(&c));
    }
    struct mixedkv_config nowhere = good;
    nowhere.n_layers              = 1;
    EXPECT(INVALID, mixedkv_configure_next(&nowhere));
    EXPECT(OK, mixedkv_configure_next(NULL));
}

// --- specs

static void test_specs(void) {
    struct mixedkv_spec spec;
    EXPECT(INVALID, mixedkv_parse(NULL, &spec));
    EXPECT(INVALID, mixedkv_parse("mixed", NULL));
    EXPECT(INVALID, mixedkv_parse("", &spec));
    EXPECT(INVALID, mixedkv_parse("mixed:threshold=8,group=16", &spec));
    EXPECT(INVALID, mixedkv_parse("mixed:cold=q4_1", &spec));
    EXPECT(INVALID, mixedkv_parse("mixed:bits=4", &spec));
    EXPECT(OK, mixedkv_parse("q8_0/q4_0", &spec));
    EXPECT(0, spec.config.mixed || spec.type_k != GGML_TYPE_Q8_0 || spec.type_v != GGML_TYPE_Q4_0);
    // a normally distributed error is beyond E with the probability D: by 1.96 and 2.58 standard errors
    EXPECT(OK, mixedkv_parse("mixed:sparse=eps:0.1", &spec));
    EXPECT(0, fabs(spec.config.sparse_error - 0.1 / 1.959964) > 1e-7);
    EXPECT(OK, mixedkv_parse("mixed:sparse=eps:0.1/0.01", &spec));
    EXPECT(0, fabs(spec.config.sparse_error - 0.1 / 2.575829) > 1e-7);
    EXPECT(OK, mixedkv_parse("mixed:sparse=eps:0.999/0.3", &spec));
    EXPECT(0, spec.config.sparse_error >= 1.0f); // as mixedkv_check() asks for
    EXPECT(OK, mixedkv_parse("mixed:budget=4.5bit", &spec));
    EXPECT(0, spec.budget_bits != 4.5 || spec.budget_bytes != 0);
    EXPECT(OK, mixedkv_parse("mixed:balanced,layers=1-:lm4/tc3", &spec));
    EXPECT(0, !spec.config.mixed || spec.config.threshold != 128 || spec.type_k != GGML_TYPE_Q8_0);
    EXPECT(0, spec.config.n_layers != 1 || spec.config.layers[0].last != -1 ||
                  spec.config.layers[0].type_v != (enum ggml_type)MIXEDKV_TYPE_TC3);
    EXPECT(OK, mixedkv_configure_next(&spec.config));
    EXPECT(OK, mixedkv_configure_next(NULL));
}

// --- types

static int decode(struct llama_context * ctx, int n, int first, int seq) {
    struct llama_batch batch = llama_batch_init(n, 0, 1);
    batch.n_tokens           = n;
    for (int i = 0; i < n; i++) {
        batch.token[i]     = 3 + (first + i) * 7 % 200;
        batch.pos[i]       = first + i;
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = seq;
        batch.logits[i]    = i == n - 1;
    }
    const int res = llama_decode(ctx, batch);
    llama_batch_free(batch);
    return res;
}

static struct llama_context * make_context(struct llama_model * model, const struct mixedkv_config * config, int type_k,
                                           int type_v) {
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx                       = 2 * N_CTX;
    params.n_seq_max                   = 2;
    params.n_threads                   = 1;
    params.n_threads_batch             = 1;
    params.flash_attn_type             = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.type_k                      = (enum ggml_type)type_k;
    params.type_v                      = (enum ggml_type)type_v;
    EXPECT(OK, mixedkv_configure_next(config));
    return llama_init_from_model(model, params);
}

// A block of rows as a caller holds it.
struct block {
    struct mixedkv_row_group  group;
    struct mixedkv_layer_rows layers[MAX_LAYERS];
    int32_t                   positions[N_CTX], hot[N_CTX], slots[N_CTX];
};

static void free_block(struct block * b) {
    for (uint32_t i = 0; i < b->group.n_layers; i++) {
        free((void *)b->layers[i].k);
        free((void *)b->layers[i].v);
        free((void *)b->layers[i].k_hot);
        free((void *)b->layers[i].v_hot);
    }
    free(b);
}

static struct block * export_block(struct llama_context * ctx) {
    struct mixedkv_layer_info  infos[MAX_LAYERS];
    struct block *             b = calloc(1, sizeof(*b));
    struct mixedkv_row_group * g = &b->group;

    EXPECT(OK, mixedkv_get_layers(ctx, infos, MAX_LAYERS, &g->n_layers));
    EXPECT(OK, mixedkv_count_rows(ctx, 0, 0, 0, -1, &g->n_rows, &g->n_hot));
    EXPECT(OK, mixedkv_export_group(ctx, 0, 0, 0, -1, g->n_rows, g->n_hot, b->positions, b->hot, b->slots, NULL));
    g->positions = b->positions;
    g->hot       = b->hot;
    g->slots     = b->slots;
    g->layers    = b->layers;
    for (uint32_t i = 0; i < g->n_layers; i++) {
        const struct mixedkv_layer_info l = infos[i];
        void *                          k = calloc(N_CTX, MAX_ROW), *v = calloc(N_CTX, MAX_ROW);
        void *                          k_hot = calloc(N_CTX, MAX_ROW), *v_hot = calloc(N_CTX, MAX_ROW);
        EXPECT(OK, mixedkv_export_layer(ctx, 0, l.il, 0, -1, g->n_rows, g->n_hot, k, v, k_hot, v_hot));
        b->layers[i] = (struct mixedkv_layer_rows){ l.il,
                                                    l.n_head_kv,
                                                    l.n_embd_head_k,
                                                    l.n_embd_head_v,
                                                    l.type_k,
                                                    l.type_v,
                                                    l.rotation_k,
                                                    l.rotation_v,
                                                    l.equalization,
                                                    k,
                                                    v,
                                                    k_hot,
                                                    v_hot };
    }
    return b;
}

// Everything that reads or writes rows of a type, in a context that was admitted.
static void use_context(struct llama_context * ctx) {
    if (decode(ctx, N_TOKENS, 0, 0) != 0) {
        printf("FAILED to decode\n");
        n_failed++;
        return;
    }
    struct block * b = export_block(ctx);
    EXPECT(OK, mixedkv_import_rows(ctx, 1, &b->group, 1, 3, -1));
    for (uint32_t i = 0; i < b->group.n_layers; i++) { // as if another cache had stored them
        b->layers[i].type_k = b->layers[i].type_v = GGML_TYPE_F16;
        b->layers[i].k                            = memset((void *)b->layers[i].k, 0, (size_t)N_CTX * MAX_ROW);
        b->layers[i].v                            = memset((void *)b->layers[i].v, 0, (size_t)N_CTX * MAX_ROW);
    }
    EXPECT(OK, mixedkv_import_rows(ctx, 1, &b->group, 1, 0, 0));
    free_block(b);

    llama_memory_seq_rm(llama_get_memory(ctx), 0, 4, 12);
    llama_memory_seq_add(llama_get_memory(ctx), 0, 12, -1, -8);
    float *  data = calloc(N_CTX, MAX_ROW);
    uint32_t n    = 0;
    EXPECT(OK, mixedkv_read_rows(ctx, 0, 0, 'k', 0, -1, true, data, NULL, NULL, N_CTX, &n));
    EXPECT(OK, mixedkv_read_rows(ctx, 0, 0, 'v', 0, -1, true, data, NULL, NULL, N_CTX, &n));
    free(data);
    if (decode(ctx, 8, N_TOKENS - 8, 0) != 0 || decode(ctx, 8, N_TOKENS, 1) != 0) {
        printf("FAILED to decode\n");
        n_failed++;
    }
}

static int is_stored(int type) {
    const int known[] = { GGML_TYPE_F32,   GGML_TYPE_F16,    GGML_TYPE_BF16,  GGML_TYPE_Q4_0,   GGML_TYPE_Q4_1,
                          GGML_TYPE_Q5_0,  GGML_TYPE_Q5_1,   GGML_TYPE_Q8_0,  GGML_TYPE_Q2_K,   GGML_TYPE_Q3_K,
                          GGML_TYPE_Q4_K,  GGML_TYPE_Q5_K,   GGML_TYPE_Q6_K,  GGML_TYPE_IQ4_NL, GGML_TYPE_IQ4_XS,
                          GGML_TYPE_TQ1_0, GGML_TYPE_TQ2_0,  GGML_TYPE_Q1_0,  GGML_TYPE_Q2_0,   GGML_TYPE_MXFP4,
                          GGML_TYPE_NVFP4, MIXEDKV_TYPE_LM4, MIXEDKV_TYPE_TC3 };
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (known[i] == type) {
            return 1;
        }
    }
    return 0;
}

// In each place of a type: K, V; a mixed cache of each attention, a uniform one of ours, llama.cpp's own.
static void test_type(struct llama_model * model, int type) {
    const struct mixedkv_config uniform = { .group_size = 1, .attention = MIXEDKV_ATTENTION_FUSED };
    const struct mixedkv_config fused   = make_config(32, 8, 4, MIXEDKV_ATTENTION_AUTO);
    const struct mixedkv_config merged  = make_config(32, 8, 4, MIXEDKV_ATTENTION_MERGED);

    const struct mixedkv_config * configs[] = { &fused, &merged, &uniform, NULL };

    for (int i = 0; i < 8; i++) {
        const struct mixedkv_config * config = configs[i / 2];
        const int                     type_k = i % 2 ? GGML_TYPE_F16 : type;
        const int                     type_v = i % 2 ? type : GGML_TYPE_F16;
        printf("type %d of %s, cache %d\n", type, i % 2 ? "V" : "K", i / 2);
        if (config) {
            EXPECT(is_stored(type) ? OK : UNSUPPORTED,
                   mixedkv_check(model, config, (enum ggml_type)type_k, (enum ggml_type)type_v, N_CTX));
        }
        struct llama_context * ctx = make_context(model, config, type_k, type_v);
        if ((ctx != NULL) != is_stored(type) || (!ctx && mixedkv_last_error()[0] == '\0')) {
            printf("FAILED, %s context: %s\n", ctx ? "a" : "no", mixedkv_last_error());
            n_failed++;
        }
        if (ctx) {
            use_context(ctx);
            llama_free(ctx);
        }
    }
}

static void test_types(struct llama_model * model) {
    for (int type = -2; type < GGML_TYPE_COUNT + 3; type++) {
        test_type(model, type);
    }
    const int far[] = { 1000, 1 << 20, INT_MAX, INT_MIN };
    for (int i = 0; i < 4; i++) {
        test_type(model, far[i]);
    }
}

// --- what is read

static void test_lists(struct llama_context * ctx) {
    struct mixedkv_stats      stats;
    struct mixedkv_layer_info layers[MAX_LAYERS];
    struct mixedkv_seq_info   seqs[2];
    uint32_t                  n = 0;

    EXPECT(INVALID, mixedkv_get_stats(NULL, &stats));
    EXPECT(INVALID, mixedkv_get_stats(ctx, NULL));
    EXPECT(INVALID, mixedkv_get_layers(NULL, layers, MAX_LAYERS, &n));
    EXPECT(INVALID, mixedkv_get_layers(ctx, NULL, 1, &n));
    EXPECT(INVALID, mixedkv_get_layers(ctx, layers, MAX_LAYERS, NULL));
    EXPECT(OK, mixedkv_get_layers(ctx, NULL, 0, &n));
    EXPECT(OK, mixedkv_get_layers(ctx, layers, UINT32_MAX, &n)); // as many as there are
    EXPECT(INVALID, mixedkv_get_sequences(NULL, seqs, 2, &n));
    EXPECT(INVALID, mixedkv_get_sequences(ctx, NULL, 1, &n));
    EXPECT(INVALID, mixedkv_get_sequences(ctx, seqs, 2, NULL));
    EXPECT(OK, mixedkv_get_sequences(ctx, seqs, UINT32_MAX, &n));
}

static void test_budget(struct llama_context * ctx) {
    int32_t               from[2];
    uint32_t              n, least;
    bool                  whole;
    struct mixedkv_config config = make_config(32, 8, 4, 0);
    EXPECT(INVALID, mixedkv_get_short(NULL, from, 2, &n));
    EXPECT(INVALID, mixedkv_get_short(ctx, NULL, 1, &n));
    EXPECT(INVALID, mixedkv_get_short(ctx, from, 2, NULL));
    EXPECT(OK, mixedkv_get_short(ctx, from, 2, &n));
    EXPECT(INVALID, mixedkv_window_is_whole(NULL, 0, 0, &whole));
    EXPECT(INVALID, mixedkv_window_is_whole(ctx, 0, -1, &whole));
    EXPECT(INVALID, mixedkv_window_is_whole(ctx, 0, 0, NULL));
    EXPECT(NOT_AVAILABLE, mixedkv_window_is_whole(ctx, -1, 0, &whole));
    EXPECT(NOT_AVAILABLE, mixedkv_window_is_whole(ctx, INT_MAX, 0, &whole));
    EXPECT(OK, mixedkv_window_is_whole(ctx, 0, INT_MAX, &whole));
    struct mixedkv_cut cut;
    EXPECT(INVALID, mixedkv_find_cut(NULL, 0, 0, &cut));
    EXPECT(INVALID, mixedkv_find_cut(ctx, 0, -1, &cut));
    EXPECT(INVALID, mixedkv_find_cut(ctx, 0, 0, NULL));
    EXPECT(NOT_AVAILABLE, mixedkv_find_cut(ctx, -1, 0, &cut));
    EXPECT(NOT_AVAILABLE, mixedkv_find_cut(ctx, INT_MAX, 0, &cut));
    EXPECT(OK, mixedkv_find_cut(ctx, 0, INT_MAX, &cut));
    EXPECT(INVALID, mixedkv_check_rows(NULL));
    EXPECT(OK, mixedkv_check_rows(ctx));
    EXPECT(INVALID, mixedkv_gpus_read(-1, MIXEDKV_TYPE_LM4, 64, 64, 4, 2, &whole));
    EXPECT(INVALID, mixedkv_gpus_read(GGML_TYPE_IQ2_XXS, GGML_TYPE_F16, 64, 64, 4, 2, &whole));
    EXPECT(INVALID, mixedkv_gpus_read(GGML_TYPE_F16, GGML_TYPE_F16, 64, 64, 4, 2, NULL));
    // sizes and counts that no model has: no device reads them
    const uint32_t unread[][4] = {
        { 64, 0, 4, 2 },  { 80, 80, 4, 2 }, { UINT32_MAX, 64, 4, 2 },  { 64, 64, 0, 2 },
        { 64, 64, 4, 0 }, { 64, 64, 4, 3 }, { 64, 64, UINT32_MAX, 1 },
    };
    for (size_t i = 0; i < sizeof(unread) / sizeof(unread[0]); i++) {
        const uint32_t * n_of = unread[i];

        whole = true;
        EXPECT(OK, mixedkv_gpus_read(GGML_TYPE_Q4_0, GGML_TYPE_F16, n_of[0], n_of[1], n_of[2], n_of[3], &whole));
        if (whole) {
            printf("  FAILED, heads of %u and %u elements, %u of Q, %u of KV are said to be read\n", n_of[0], n_of[1],
                   n_of[2], n_of[3]);
            n_failed++;
        }
    }
    EXPECT(INVALID, mixedkv_count_ring_rows(NULL, 1, 256, 1, 1, &n, &least));
    EXPECT(INVALID, mixedkv_count_ring_rows(&config, 1, 256, 1, 1, NULL, &least));
    EXPECT(INVALID, mixedkv_count_ring_rows(&config, 1, 256, 1, 1, &n, NULL));
    EXPECT(OK, mixedkv_count_ring_rows(&config, UINT32_MAX, UINT32_MAX, UINT32_MAX, 0, &n, &least));
    EXPECT(OK, mixedkv_count_ring_rows(&config, 1, 0, 0, 0, &n, &least));
}

static void test_window(struct llama_context * ctx) {
    EXPECT(INVALID, mixedkv_set_window(NULL, 32, 8, 4));
    EXPECT(INVALID, mixedkv_set_window(ctx, 32, 0, 4));
    EXPECT(INVALID, mixedkv_set_window(ctx, 8, 32, 4));
    EXPECT(INVALID, mixedkv_set_window(ctx, UINT32_MAX, 8, 4));
    EXPECT(INVALID, mixedkv_set_window(ctx, 32, UINT32_MAX, 4));
    EXPECT(INVALID, mixedkv_set_window(ctx, 32, 8, UINT32_MAX));
    EXPECT(INVALID, mixedkv_set_window(ctx, UINT32_MAX, UINT32_MAX, UINT32_MAX));
    EXPECT(OK, mixedkv_set_window(ctx, 33, 8, 5));
    EXPECT(OK, mixedkv_set_window(ctx, INT32_MAX, 8, INT32_MAX));
    EXPECT(OK, mixedkv_set_window(ctx, 0, INT32_MAX, 0));
    EXPECT(OK, mixedkv_set_window(ctx, 32, 8, 4));
}

static void test_read_rows(struct llama_context * ctx) {
    float *  data = calloc(N_CTX, MAX_ROW);
    uint32_t n    = 0;

    EXPECT(INVALID, mixedkv_read_rows(NULL, 0, 0, 'k', 0, -1, false, data, NULL, NULL, N_CTX, &n));
    EXPECT(INVALID, mixedkv_read_rows(ctx, 0, 0, 'k', 0, -1, false, data, NULL, NULL, N_CTX, NULL));
    EXPECT(INVALID, mixedkv_read_rows(ctx, 0, 0, 'x', 0, -1, false, data, NULL, NULL, N_CTX, &n));
    EXPECT(INVALID, mixedkv_read_rows(ctx, 0, 0, 0, 0, -1, false, data, NULL, NULL, N_CTX, &n));
    for (int i = 0; i < 4; i++) {
        const int32_t far = (const int32_t[]){ -1, 1000, INT32_MAX, INT32_MIN }[i];
        EXPECT(NOT_AVAILABLE, mixedkv_read_rows(ctx, far, 0, 'k', 0, -1, false, data, NULL, NULL, N_CTX, &n));
        EXPECT(NOT_AVAILABLE, mixedkv_read_rows(ctx, 0, far, 'k', 0, -1, false, data, NULL, NULL, N_CTX, &n));
    }
    EXPECT(NOT_AVAILABLE, mixedkv_read_rows(ctx, 0, 2, 'k', 0, -1, false, data, NULL, NULL, N_CTX, &n));
    EXPECT(OK, mixedkv_read_rows(ctx, 0, 0, 'k', 20, 10, false, data, NULL, NULL, N_CTX, &n));
    expect(0, (int)n); // the range is empty
    EXPECT(OK, mixedkv_read_rows(ctx, 0, 0, 'k', INT32_MAX, INT32_MAX, false, data, NULL, NULL, N_CTX, &n));
    EXPECT(OK, mixedkv_read_rows(ctx, 0, 0, 'k', INT32_MIN, INT32_MIN, false, data, NULL, NULL, N_CTX, &n));
    EXPECT(OK, mixedkv_read_rows(ctx, 0, 0, 'k', 0, -1, false, data, NULL, NULL, UINT32_MAX, &n));
    EXPECT(OK, mixedkv_read_rows(ctx, 0, 0, 'k', 0, -1, false, NULL, NULL, NULL, UINT32_MAX, &n));
    EXPECT(OK, mixedkv_read_rows(ctx, 0, 1, 'k', 0, -1, false, data, NULL, NULL, N_CTX, &n));
    free(data);
}

// --- rows that leave

static void test_count_rows(struct llama_context * ctx) {
    uint32_t n_rows = 0, n_hot = 0;

    EXPECT(INVALID, mixedkv_count_rows(NULL, 0, 0, 0, -1, &n_rows, &n_hot));
    EXPECT(INVALID, mixedkv_count_rows(ctx, 0, 0, 0, -1, NULL, &n_hot));
    EXPECT(INVALID, mixedkv_count_rows(ctx, 0, 0, 0, -1, &n_rows, NULL));
    EXPECT(INVALID, mixedkv_count_rows(ctx, 0, 0, -1, -1, &n_rows, &n_hot));
    EXPECT(INVALID, mixedkv_count_rows(ctx, 0, 0, INT32_MIN, -1, &n_rows, &n_hot));
    EXPECT(NOT_AVAILABLE, mixedkv_count_rows(ctx, -1, 0, 0, -1, &n_rows, &n_hot));
    EXPECT(NOT_AVAILABLE, mixedkv_count_rows(ctx, 2, 0, 0, -1, &n_rows, &n_hot));
    EXPECT(NOT_AVAILABLE, mixedkv_count_rows(ctx, INT32_MAX, 0, 0, -1, &n_rows, &n_hot));
    EXPECT(NOT_AVAILABLE, mixedkv_count_rows(ctx, 0, 1, 0, -1, &n_rows, &n_hot));
    EXPECT(NOT_AVAILABLE, mixedkv_count_rows(ctx, 0, UINT32_MAX, 0, -1, &n_rows, &n_hot));
    EXPECT(NOT_AVAILABLE, mixedkv_count_rows(ctx, 0, 0, 20, 10, &n_rows, &n_hot));
    EXPECT(NOT_AVAILABLE, mixedkv_count_rows(ctx, 0, 0, 0, N_TOKENS + 1, &n_rows, &n_hot));
    EXPECT(NOT_AVAILABLE, mixedkv_count_rows(ctx, 0, 0, 0, INT32_MAX, &n_rows, &n_hot));
    EXPECT(NOT_AVAILABLE, mixedkv_count_rows(ctx, 0, 0, INT32_MAX, -1, &n_rows, &n_hot));
    EXPECT(NOT_AVAILABLE, mixedkv_count_rows(ctx, 0, 0, INT32_MAX, INT32_MAX, &n_rows, &n_hot));
    EXPECT(NOT_AVAILABLE, mixedkv_count_rows(ctx, 1, 0, 0, -1, &n_rows, &n_hot)); // it is empty
}

// --- what rows are

static void test_validity_arguments(struct llama_context * ctx, const llama_token * tokens) {
    enum mixedkv_validity validity[N_TOKENS];
    int32_t               n       = 0;
    uint64_t              past    = 0;
    const char *          setting = NULL;

    EXPECT(INVALID, mixedkv_count_computed(NULL, 0, 0, tokens, N_TOKENS, &n));
    EXPECT(INVALID, mixedkv_count_computed(ctx, 0, 0, tokens, N_TOKENS, NULL));
    EXPECT(INVALID, mixedkv_count_computed(ctx, 0, 0, NULL, N_TOKENS, &n));
    EXPECT(INVALID, mixedkv_count_computed(ctx, 0, -1, tokens, N_TOKENS, &n));
    EXPECT(NOT_AVAILABLE, mixedkv_count_computed(ctx, -1, 0, tokens, N_TOKENS, &n));
    EXPECT(NOT_AVAILABLE, mixedkv_count_computed(ctx, INT_MAX, 0, tokens, N_TOKENS, &n));

    EXPECT(INVALID, mixedkv_get_validity(NULL, 0, 0, tokens, N_TOKENS, validity));
    EXPECT(INVALID, mixedkv_get_validity(ctx, 0, 0, tokens, N_TOKENS, NULL));
    EXPECT(INVALID, mixedkv_get_validity(ctx, 0, 0, NULL, N_TOKENS, validity));
    EXPECT(INVALID, mixedkv_get_validity(ctx, 0, -1, tokens, N_TOKENS, validity));
    EXPECT(INVALID, mixedkv_get_validity(ctx, 0, INT_MAX, tokens, N_TOKENS, validity));
    EXPECT(INVALID, mixedkv_get_validity(ctx, 0, 0, tokens, UINT32_MAX, validity));
    EXPECT(NOT_AVAILABLE, mixedkv_get_validity(ctx, -1, 0, tokens, N_TOKENS, validity));
    EXPECT(NOT_AVAILABLE, mixedkv_get_validity(ctx, INT_MAX, 0, tokens, N_TOKENS, validity));
    EXPECT(OK, mixedkv_get_validity(ctx, 0, 0, NULL, 0, NULL));

    EXPECT(INVALID, mixedkv_set_validity(NULL, 0, 0, 0, tokens, N_TOKENS, MIXEDKV_COMPUTED, NULL));
    EXPECT(INVALID, mixedkv_set_validity(ctx, 0, 0, 0, NULL, N_TOKENS, MIXEDKV_COMPUTED, NULL));
    EXPECT(INVALID, mixedkv_set_validity(ctx, 0, -1, 0, tokens, N_TOKENS, MIXEDKV_COMPUTED, NULL));
    EXPECT(INVALID, mixedkv_set_validity(ctx, 0, 0, 0, tokens, N_TOKENS, (enum mixedkv_validity)5, NULL));
    EXPECT(INVALID, mixedkv_set_validity(ctx, 0, 0, 0, tokens, N_TOKENS, (enum mixedkv_validity) - 1, NULL));
    EXPECT(NOT_AVAILABLE, mixedkv_set_validity(ctx, -1, 0, 0, tokens, N_TOKENS, MIXEDKV_COMPUTED, NULL));
    EXPECT(NOT_AVAILABLE, mixedkv_set_validity(ctx, INT_MAX, 0, 0, tokens, N_TOKENS, MIXEDKV_COMPUTED, NULL));

    EXPECT(INVALID, mixedkv_name_model(NULL, "model"));
    EXPECT(INVALID, mixedkv_name_model(ctx, NULL));
    EXPECT(INVALID, mixedkv_get_setting(NULL, 0, -1, &setting));
    EXPECT(INVALID, mixedkv_get_setting(ctx, 0, -1, NULL));
    EXPECT(NOT_AVAILABLE, mixedkv_get_setting(ctx, -1, 0, &setting));

    EXPECT(INVALID, mixedkv_get_past(NULL, 0, 0, 1, &past));
    EXPECT(INVALID, mixedkv_get_past(ctx, 0, 1, INT_MAX, &past));
    EXPECT(INVALID, mixedkv_get_past(ctx, 0, -1, 1, &past));
    EXPECT(INVALID, mixedkv_get_past(ctx, 0, 0, 1, NULL));
    EXPECT(NOT_AVAILABLE, mixedkv_get_past(ctx, -1, 0, 1, &past));
    EXPECT(NOT_AVAILABLE, mixedkv_get_past(ctx, INT_MAX, 0, 1, &past));

    EXPECT(INVALID, mixedkv_limit_validity(NULL, 0, 0, -1, MIXEDKV_UNVERIFIED));
    EXPECT(INVALID, mixedkv_limit_validity(ctx, 0, -1, -1, MIXEDKV_UNVERIFIED));
    EXPECT(INVALID, mixedkv_limit_validity(ctx, 0, 0, -1, (enum mixedkv_validity)INT_MAX));
    EXPECT(NOT_AVAILABLE, mixedkv_limit_validity(ctx, -1, 0, -1, MIXEDKV_UNVERIFIED));
    EXPECT(NOT_AVAILABLE, mixedkv_limit_validity(ctx, INT_MAX, 0, -1, MIXEDKV_UNVERIFIED));
}

static void expect_number(int want, int got) {
    if (got != want) {
        printf("FAILED, %d instead of %d\n", got, want);
        n_failed++;
    }
}

static void expect_validity(struct llama_context * ctx, const llama_token * tokens, int at, int n,
                            enum mixedkv_validity wanted) {
    enum mixedkv_validity validity[N_TOKENS];

    EXPECT(OK, mixedkv_get_validity(ctx, 0, at, tokens + at, (uint32_t)n, validity));
    for (int i = 0; i < n; i++) {
        expect_number((int)wanted, (int)validity[i]);
    }
}

static void expect_computed(struct llama_context * ctx, const llama_token * tokens, int wanted) {
    int32_t n = -1;

    EXPECT(OK, mixedkv_count_computed(ctx, 0, 0, tokens, N_TOKENS, &n));
    expect_number(wanted, n);
}

static void test_validity(struct llama_context * ctx) {
    llama_token tokens[N_TOKENS], others[N_TOKENS];
    uint64_t    past = 0;

    const char * setting = NULL;

    for (int i = 0; i < N_TOKENS; i++) {
        tokens[i] = 3 + i * 7 % 200; // as decode() evaluates them
        others[i] = i < 20 ? tokens[i] : 1;
    }
    test_validity_arguments(ctx, tokens);

    expect_computed(ctx, tokens, N_TOKENS);
    expect_validity(ctx, tokens, 0, N_TOKENS, MIXEDKV_COMPUTED);
    expect_computed(ctx, others, 20);
    expect_validity(ctx, others, 20, N_TOKENS - 20, MIXEDKV_UNVERIFIED);

    EXPECT(OK, mixedkv_limit_validity(ctx, 0, 10, 12, MIXEDKV_APPROXIMATE));
    EXPECT(OK, mixedkv_limit_validity(ctx, 0, 10, 12, MIXEDKV_COMPUTED)); // no better for that
    expect_computed(ctx, tokens, 10);
    expect_validity(ctx, tokens, 10, 2, MIXEDKV_APPROXIMATE);
    expect_validity(ctx, tokens, 12, N_TOKENS - 12, MIXEDKV_COMPUTED);

    expect_number(0, decode(ctx, 4, N_TOKENS, 0)); // no better than the worst that they attend to
    EXPECT(OK, mixedkv_set_validity(ctx, 0, 10, 0, tokens + 10, 2, MIXEDKV_COMPUTED,
                                    NULL)); // behind nothing, which it is not
    expect_computed(ctx, tokens, 10);
    EXPECT(OK, mixedkv_get_past(ctx, 0, 10, 1, &past));
    expect_number(true, past == mixedkv_extend_past(0, tokens, 10));
    EXPECT(OK,
           mixedkv_set_validity(ctx, 0, 10, past, tokens + 10, 2, MIXEDKV_COMPUTED, NULL)); // under whatever setting
    expect_computed(ctx, tokens, 10);
    EXPECT(OK, mixedkv_get_setting(ctx, 0, 10, &setting));
    expect_number(0, (int)strlen(setting));
    EXPECT(OK, mixedkv_name_model(ctx, "model=one"));
    EXPECT(OK, mixedkv_get_setting(ctx, 0, 9, &setting));
    expect_number(0, strncmp(setting, "model=one llama.cpp=", 20));
    EXPECT(OK,
           mixedkv_set_validity(ctx, 0, 10, past, tokens + 10, 2, MIXEDKV_COMPUTED, setting + 10)); // of which model?
    expect_computed(ctx, tokens, 10);
    EXPECT(OK, mixedkv_get_setting(ctx, -1, -1, &setting));
    EXPECT(OK, mixedkv_set_validity(ctx, 0, 10, past, tokens + 10, 2, MIXEDKV_COMPUTED, setting));
    expect_computed(ctx, tokens, N_TOKENS);
    EXPECT(OK, mixedkv_get_past(ctx, 0, 0, 1, &past));
    expect_number(true, past == 0 && mixedkv_extend_past(7, NULL, 0) == 7);
    expect_number(true, llama_memory_seq_rm(llama_get_memory(ctx), 0, N_TOKENS, -1));

    expect_number(0, (int)strlen(mixedkv_refused(ctx)));
    expect_number(0, (int)strlen(mixedkv_refused(NULL)));
    expect_number(0, strcmp(mixedkv_bits_problem(NULL), "ctx is NULL"));
}

static void test_export(struct llama_context * ctx) {
    int32_t  ints[3][N_CTX];
    void *   k      = calloc(N_CTX, MAX_ROW);
    uint32_t n_rows = 0, n_hot = 0;

    EXPECT(OK, mixedkv_count_rows(ctx, 0, 0, 0, -1, &n_rows, &n_hot));
    EXPECT(INVALID, mixedkv_export_group(NULL, 0, 0, 0, -1, n_rows, n_hot, ints[0], ints[1], ints[2], NULL));
    EXPECT(INVALID, mixedkv_export_group(ctx, 0, 0, 0, -1, n_rows, n_hot, NULL, ints[1], ints[2], NULL));
    EXPECT(INVALID, mixedkv_export_group(ctx, 0, 0, 0, -1, n_rows, n_hot, ints[0], NULL, ints[2], NULL));
    EXPECT(INVALID, mixedkv_export_group(ctx, 0, 0, 0, -1, n_rows, n_hot, ints[0], ints[1], NULL, NULL));
    EXPECT(INVALID, mixedkv_export_group(ctx, 0, 0, 0, -1, n_rows, n_hot, ints[0], ints[1], ints[2], ints[0]));
    EXPECT(INVALID, mixedkv_export_group(ctx, 0, 0, -5, -1, n_rows, n_hot, ints[0], ints[1], ints[2], NULL));
    EXPECT(NOT_AVAILABLE, mixedkv_export_group(ctx, 2, 0, 0, -1, n_rows, n_hot, ints[0], ints[1], ints[2], NULL));
    EXPECT(NOT_AVAILABLE,
           mixedkv_export_group(ctx, 0, UINT32_MAX, 0, -1, n_rows, n_hot, ints[0], ints[1], ints[2], NULL));
    EXPECT(NOT_AVAILABLE, mixedkv_export_group(ctx, 0, 0, 0, -1, UINT32_MAX, n_hot, ints[0], ints[1], ints[2], NULL));
    EXPECT(NOT_AVAILABLE, mixedkv_export_group(ctx, 0, 0, 0, -1, n_rows, UINT32_MAX, ints[0], ints[1], ints[2], NULL));
    EXPECT(NOT_AVAILABLE, mixedkv_export_group(ctx, 0, 0, 20, 10, 0, 0, ints[0], ints[1], ints[2], NULL));

    EXPECT(INVALID, mixedkv_export_layer(NULL, 0, 0, 0, -1, n_rows, n_hot, k, k, k, k));
    EXPECT(INVALID, mixedkv_export_layer(ctx, 0, 0, 0, -1, n_rows, n_hot, NULL, k, k, k));
    EXPECT(INVALID, mixedkv_export_layer(ctx, 0, 0, 0, -1, n_rows, n_hot, k, NULL, k, k));
    EXPECT(INVALID, mixedkv_export_layer(ctx, 0, 0, 0, -1, n_rows, n_hot, k, k, NULL, k));
    EXPECT(INVALID, mixedkv_export_layer(ctx, 0, 0, 0, -1, n_rows, n_hot, k, k, k, NULL));
    EXPECT(INVALID, mixedkv_export_layer(ctx, 0, 0, -5, -1, n_rows, n_hot, k, k, k, k));
    EXPECT(NOT_AVAILABLE, mixedkv_export_layer(ctx, -1, 0, 0, -1, n_rows, n_hot, k, k, k, k));
    EXPECT(NOT_AVAILABLE, mixedkv_export_layer(ctx, 0, -1, 0, -1, n_rows, n_hot, k, k, k, k));
    EXPECT(NOT_AVAILABLE, mixedkv_export_layer(ctx, 0, INT32_MAX, 0, -1, n_rows, n_hot, k, k, k, k));
    EXPECT(NOT_AVAILABLE, mixedkv_export_layer(ctx, 0, 0, 0, -1, UINT32_MAX, n_hot, k, k, k, k));
    EXPECT(NOT_AVAILABLE, mixedkv_export_layer(ctx, 0, 0, 20, 10, 0, 0, k, k, k, k));
    free(k);
}

// --- rows that come back

// One field wrong at a time, then right again.
#define EXPECT_WRONG(field, value)                                         \
    do {                                                                   \
        const struct block good = *b;                                      \
        field                   = (value);                                 \
        printf("%s = %s: ", #field, #value);                               \
        EXPECT(INVALID, mixedkv_import_rows(ctx, 1, &b->group, 1, 0, -1)); \
        *b = good;                                                         \
    } while (0)

static void test_import_group(struct llama_context * ctx, struct block * b) {
    EXPECT_WRONG(b->group.positions, NULL);
    EXPECT_WRONG(b->group.hot, NULL);
    EXPECT_WRONG(b->group.slots, NULL);
    EXPECT_WRONG(b->group.layers, NULL);
    EXPECT_WRONG(b->group.n_rows, UINT32_MAX);
    EXPECT_WRONG(b->group.n_rows, INT32_MAX);
    EXPECT_WRONG(b->group.n_rows, 0);
    EXPECT_WRONG(b->group.n_hot, UINT32_MAX);
    EXPECT_WRONG(b->group.n_layers, 0);
    EXPECT_WRONG(b->group.n_layers, UINT32_MAX);
    EXPECT_WRONG(b->positions[0], -1);
    EXPECT_WRONG(b->positions[5], 4);
    EXPECT_WRONG(b->positions[5], INT32_MIN);
    EXPECT_WRONG(b->positions[N_TOKENS - 1], INT32_MAX);
    EXPECT_WRONG(b->hot[0], -1);
    EXPECT_WRONG(b->hot[1], b->hot[0]);
    EXPECT_WRONG(b->hot[b->group.n_hot - 1], N_TOKENS);
    EXPECT_WRONG(b->hot[b->group.n_hot - 1], INT32_MAX);
}

static void test_import_layer(struct llama_context * ctx, struct block * b) {
    const int types[] = { -1,
                          4,
                          5,
                          GGML_TYPE_I8,
                          GGML_TYPE_I32,
                          GGML_TYPE_F64,
                          GGML_TYPE_Q8_1,
                          GGML_TYPE_Q8_K,
                          31,
                          37,
                          GGML_TYPE_COUNT,
                          1000,
                          INT_MAX,
                          INT_MIN };
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        EXPECT_WRONG(b->layers[0].type_k, (enum ggml_type)types[i]);
        EXPECT_WRONG(b->layers[1].type_v, (enum ggml_type)types[i]);
    }
    EXPECT_WRONG(b->layers[0].il, -1);
    EXPECT_WRONG(b->layers[0].il, INT32_MAX);
    EXPECT_WRONG(b->layers[0].il, b->layers[1].il);
    EXPECT_WRONG(b->layers[0].n_head_kv, 0);
    EXPECT_WRONG(b->layers[0].n_head_kv, UINT32_MAX);
    EXPECT_WRONG(b->layers[0].n_embd_head_k, UINT32_MAX);
    EXPECT_WRONG(b->layers[0].n_embd_head_v, UINT32_MAX);
    EXPECT_WRONG(b->layers[0].rotation_k, 3);
    EXPECT_WRONG(b->layers[0].rotation_k, 1u << 31);
    EXPECT_WRONG(b->layers[0].rotation_v, UINT32_MAX);
    EXPECT_WRONG(b->layers[0].k, NULL);
    EXPECT_WRONG(b->layers[0].v, NULL);
    EXPECT_WRONG(b->layers[1].k_hot, NULL);
    EXPECT_WRONG(b->layers[1].v_hot, NULL);
}

static void test_import(struct llama_context * ctx) {
    struct block *           b      = export_block(ctx);
    struct mixedkv_row_group two[2] = { b->group, b->group };
    struct mixedkv_row_group none   = { 0 };
    const int32_t            far[]  = { INT32_MAX, INT32_MIN, INT32_MAX - N_TOKENS + 1, -1 };

    EXPECT(INVALID, mixedkv_import_rows(NULL, 1, &b->group, 1, 0, -1));
    EXPECT(INVALID, mixedkv_import_rows(ctx, 1, NULL, 1, 0, -1));
    EXPECT(INVALID, mixedkv_import_rows(ctx, 1, &b->group, 0, 0, -1));
    EXPECT(INVALID, mixedkv_import_rows(ctx, 1, &b->group, UINT32_MAX, 0, -1));
    EXPECT(INVALID, mixedkv_import_rows(ctx, 1, two, 2, 0, -1));
    EXPECT(INVALID, mixedkv_import_rows(ctx, 1, &none, 1, 0, -1));
    EXPECT(NOT_AVAILABLE, mixedkv_import_rows(ctx, 2, &b->group, 1, 0, -1));
    EXPECT(NOT_AVAILABLE, mixedkv_import_rows(ctx, -1, &b->group, 1, 0, -1));
    EXPECT(NOT_AVAILABLE, mixedkv_import_rows(ctx, INT32_MIN, &b->group, 1, 0, -1));
    for (int i = 0; i < 4; i++) {
        EXPECT(INVALID, mixedkv_import_rows(ctx, 1, &b->group, 1, far[i], -1));
    }
    test_import_group(ctx, b);
    test_import_layer(ctx, b);

    for (uint32_t i = 0; i < b->group.n_hot; i++) { // slots are a wish
        b->slots[i] = (const int32_t[]){ INT32_MIN, -2, -1, INT32_MAX, 1 << 20, 0 }[i % 6];
    }
    uint32_t n = 0;
    EXPECT(OK, mixedkv_read_rows(ctx, 0, 1, 'k', 0, -1, false, NULL, NULL, NULL, 0, &n));
    expect(0, (int)n); // nothing has been changed so far
    EXPECT(OK, mixedkv_import_rows(ctx, 1, &b->group, 1, 0, INT32_MIN));
    EXPECT(INVALID, mixedkv_import_rows(ctx, 1, &b->group, 1, 0, INT32_MAX)); // they are there already
    EXPECT(OK, mixedkv_import_rows(ctx, 1, &b->group, 1, 0, 0));
    free_block(b);
}

// Rows without their F16 copies, and then the copies: what a sequence gets back in two steps. It ends as test_import
// left it.
static void test_parts(struct llama_context * ctx) {
    struct block *           b    = export_block(ctx);
    const uint32_t           hot  = b->group.n_hot;
    struct mixedkv_row_group none = { 0 };
    struct mixedkv_row_group two[2];
    uint32_t                 n_rows = 0, n_hot = 0;

    llama_memory_seq_rm(llama_get_memory(ctx), 1, -1, -1);
    EXPECT(INVALID, mixedkv_import_part(NULL, 1, &b->group, 1));
    EXPECT(INVALID, mixedkv_import_part(ctx, 1, NULL, 1));
    EXPECT(INVALID, mixedkv_import_part(ctx, 1, &b->group, 0));
    EXPECT(INVALID, mixedkv_import_part(ctx, 1, &none, 1));
    EXPECT(NOT_AVAILABLE, mixedkv_import_part(ctx, 2, &b->group, 1));
    EXPECT(NOT_AVAILABLE, mixedkv_import_part(ctx, INT32_MIN, &b->group, 1));
    EXPECT(INVALID, mixedkv_restore_window(ctx, 1, &b->group, 1)); // rows that it does not have

    b->group.n_hot = 0;
    EXPECT(OK, mixedkv_import_part(ctx, 1, &b->group, 1));
    EXPECT(OK, mixedkv_count_rows(ctx, 1, 0, 0, -1, &n_rows, &n_hot));
    expect(0, n_rows != N_TOKENS);
    expect(0, (int)n_hot);
    EXPECT(INVALID, mixedkv_import_part(ctx, 1, &b->group, 1)); // they are there already

    b->group.n_hot = hot;
    two[0] = two[1] = b->group;
    EXPECT(INVALID, mixedkv_restore_window(NULL, 1, &b->group, 1));
    EXPECT(INVALID, mixedkv_restore_window(ctx, 1, NULL, 1));
    EXPECT(INVALID, mixedkv_restore_window(ctx, 1, &b->group, 0));
    EXPECT(INVALID, mixedkv_restore_window(ctx, 1, two, 2));
    EXPECT(NOT_AVAILABLE, mixedkv_restore_window(ctx, -1, &b->group, 1));
    EXPECT(OK, mixedkv_restore_window(ctx, 1, &b->group, 1));
    EXPECT(OK, mixedkv_release_hot_rows(ctx, 1));
    EXPECT(OK, mixedkv_hold_hot_rows(ctx, 1));
    EXPECT(NOT_AVAILABLE, mixedkv_release_hot_rows(ctx, -1));
    EXPECT(NOT_AVAILABLE, mixedkv_hold_hot_rows(ctx, 1000000));
    EXPECT(INVALID, mixedkv_hold_hot_rows(NULL, 1));
    EXPECT(OK, mixedkv_count_rows(ctx, 1, 0, 0, -1, &n_rows, &n_hot));
    expect(0, hot == 0 || n_hot != hot);
    free_block(b);
}

// --- two threads

struct holder {
    struct llama_context * ctx;
    atomic_int             is_inside, may_leave;
};

static void wait_for(atomic_int * flag) {
    while (!atomic_load(flag)) {
        sched_yield();
    }
}

static void * hold(void * arg) {
    struct holder * h = arg;
    EXPECT(OK, mixedkv_enter(h->ctx, false));
    EXPECT(OK, mixedkv_enter(h->ctx, true)); // again
    atomic_store(&h->is_inside, 1);
    wait_for(&h->may_leave);
    EXPECT(OK, mixedkv_leave(h->ctx));
    EXPECT(OK, mixedkv_leave(h->ctx));
    return NULL;
}

static void * decode_beside(void * arg) {
    struct holder * h = arg;
    atomic_store(&h->is_inside, 1);
    expect(0, decode(h->ctx, 1, N_TOKENS, 0));
    atomic_store(&h->may_leave, 1);
    return NULL;
}

static void test_busy(struct llama_context * ctx) {
    struct mixedkv_stats    stats;
    struct mixedkv_seq_info seqs[2];
    struct holder           other = { ctx, 0, 0 }, decoder = { ctx, 0, 0 };
    struct block *          b     = export_block(ctx);
    const llama_token       token = 1;
    const llama_pos         at    = N_TOKENS;
    int32_t                 list[N_CTX];
    bool                    whole = false;
    uint32_t                n = 0, n_rows = b->group.n_rows, n_hot = b->group.n_hot;
    void *                  out = calloc(N_CTX, MAX_ROW);
    pthread_t               thread;

    EXPECT(INVALID, mixedkv_enter(NULL, false));
    EXPECT(INVALID, mixedkv_leave(NULL));
    EXPECT(INVALID, mixedkv_want_logits(NULL, NULL, 0));
    EXPECT(INVALID, mixedkv_want_logits(ctx, &n, 0)); // not the words of the vocabulary
    EXPECT(OK, mixedkv_want_logits(ctx, NULL, 0));
    EXPECT(INVALID, mixedkv_take_not_finite(NULL, NULL, 0, &n));
    EXPECT(INVALID, mixedkv_take_not_finite(ctx, NULL, 0, NULL));
    EXPECT(OK, mixedkv_take_not_finite(ctx, NULL, 0, &n));
    expect(0, (int)n);
    EXPECT(INVALID, mixedkv_clear_unused(NULL));
    EXPECT(OK, mixedkv_clear_unused(ctx));

    expect(0, pthread_create(&thread, NULL, hold, &other));
    wait_for(&other.is_inside);
    EXPECT(BUSY, mixedkv_enter(ctx, false));
    EXPECT(BUSY, mixedkv_want_logits(ctx, NULL, 0));
    EXPECT(BUSY, mixedkv_get_stats(ctx, &stats));
    EXPECT(BUSY, mixedkv_get_sequences(ctx, seqs, 2, &n));
    EXPECT(BUSY, mixedkv_get_short(ctx, list, 2, &n));
    EXPECT(BUSY, mixedkv_window_is_whole(ctx, 0, N_TOKENS, &whole));
    EXPECT(BUSY, mixedkv_check_rows(ctx));
    EXPECT(BUSY, mixedkv_set_window(ctx, 16, 8, 4));
    EXPECT(BUSY, mixedkv_read_rows(ctx, 0, 0, 'k', 0, -1, false, NULL, NULL, NULL, 0, &n));
    EXPECT(BUSY, mixedkv_count_rows(ctx, 0, 0, 0, -1, &n, &n));
    EXPECT(BUSY, mixedkv_export_group(ctx, 0, 0, 0, -1, n_rows, n_hot, list, list, list, NULL));
    EXPECT(BUSY, mixedkv_export_layer(ctx, 0, 0, 0, -1, n_rows, n_hot, out, out, out, out));
    EXPECT(BUSY, mixedkv_import_rows(ctx, 1, &b->group, 1, 0, 0));
    EXPECT(BUSY, mixedkv_import_part(ctx, 1, &b->group, 1));
    EXPECT(BUSY, mixedkv_restore_window(ctx, 1, &b->group, 1));
    EXPECT(BUSY, mixedkv_fill(ctx, 1, &token, &at, 1, false, -1, NULL, 0));
    EXPECT(OK, mixedkv_get_layers(ctx, NULL, 0, &n)); // which never change
    atomic_store(&other.may_leave, 1);
    expect(0, pthread_join(thread, NULL));

    EXPECT(OK, mixedkv_enter(ctx, true));
    expect(0, pthread_create(&thread, NULL, decode_beside, &decoder));
    wait_for(&decoder.is_inside);
    for (int i = 0; i < 200; i++) { // longer than this decode takes
        EXPECT(OK, mixedkv_export_layer(ctx, 0, 0, 0, -1, n_rows, n_hot, out, out, out, out));
    }
    expect(0, atomic_load(&decoder.may_leave));
    EXPECT(OK, mixedkv_leave(ctx));
    expect(0, pthread_join(thread, NULL));
    expect(0, llama_memory_seq_pos_max(llama_get_memory(ctx), 0) != N_TOKENS); // one more than before
    llama_memory_seq_rm(llama_get_memory(ctx), 0, N_TOKENS, -1);
    free(out);
    free_block(b);
}

// Sequence 1 has what test_import left there: positions 0 to N_TOKENS - 1, of which some are removed first.
static void test_fill(struct llama_context * ctx) {
    const llama_token tokens[]  = { 1, 2, 3 };
    const llama_pos   free_at[] = { 3, 5, N_TOKENS + 4 };
    const llama_pos   taken[]   = { 2, 3, 5 };
    const llama_pos   wrong[]   = { 5, 3, 9 };
    const llama_pos   below[]   = { -1, 3, 5 };
    float             mass[8]   = { 0 };

    llama_memory_seq_rm(llama_get_memory(ctx), 1, 3, 4);
    llama_memory_seq_rm(llama_get_memory(ctx), 1, 5, 6);

    EXPECT(INVALID, mixedkv_fill(NULL, 1, tokens, free_at, 3, false, -1, NULL, 0));
    EXPECT(INVALID, mixedkv_fill(ctx, 1, NULL, free_at, 3, false, -1, NULL, 0));
    EXPECT(INVALID, mixedkv_fill(ctx, 1, tokens, NULL, 3, false, -1, NULL, 0));
    EXPECT(INVALID, mixedkv_fill(ctx, 1, tokens, free_at, 3, false, -1, NULL, 1));
    EXPECT(INVALID, mixedkv_fill(ctx, 1, tokens, free_at, 0, false, -1, NULL, 0));
    EXPECT(INVALID, mixedkv_fill(ctx, 1, tokens, free_at, UINT32_MAX, false, -1, NULL, 0));
    EXPECT(INVALID, mixedkv_fill(ctx, 1, tokens, taken, 3, false, -1, NULL, 0));
    EXPECT(INVALID, mixedkv_fill(ctx, 1, tokens, wrong, 3, false, -1, NULL, 0));
    EXPECT(INVALID, mixedkv_fill(ctx, 1, tokens, below, 3, false, -1, NULL, 0));
    EXPECT(NOT_AVAILABLE, mixedkv_fill(ctx, 2, tokens, free_at, 3, false, -1, NULL, 0));
    EXPECT(NOT_AVAILABLE, mixedkv_fill(ctx, -1, tokens, free_at, 3, false, -1, NULL, 0));
    EXPECT(INVALID, mixedkv_fill(ctx, 1, (const llama_token[]){ INT32_MAX }, free_at, 1, false, -1, NULL, 0));

    EXPECT(INVALID, mixedkv_fill(ctx, 1, tokens, free_at, 2, false, INT32_MAX, mass, 8)); // no such layer
    EXPECT(OK, mixedkv_fill(ctx, 1, tokens, free_at, 2, false, -1, mass, 8));
    expect(0, !(mass[4] > 0)); // the sinks before it are read in F16
    expect(0, mass[6] != 0);   // behind the tokens
    EXPECT(INVALID, mixedkv_fill(ctx, 1, tokens, free_at, 2, false, -1, NULL, 0)); // they are there now
    EXPECT(OK, mixedkv_fill(ctx, 1, tokens, free_at + 2, 1, true, -1, NULL, 0));
    expect(0, llama_get_logits_ith(ctx, -1) == NULL);
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s MODEL\n", argv[0]);
        return EXIT_FAILURE;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    llama_backend_init();
    struct llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) {
        return EXIT_FAILURE;
    }
    test_configurations(model);
    test_specs();
    test_types(model);

    const struct mixedkv_config config = make_config(32, 8, 4, MIXEDKV_ATTENTION_AUTO);
    struct llama_context *      ctx    = make_context(model, &config, GGML_TYPE_Q4_0, GGML_TYPE_Q4_0);
    if (!ctx || decode(ctx, N_TOKENS, 0, 0) != 0) {
        return EXIT_FAILURE;
    }
    test_lists(ctx);
    test_validity(ctx);
    test_read_rows(ctx);
    test_count_rows(ctx);
    test_export(ctx);
    test_import(ctx);
    test_parts(ctx);
    test_busy(ctx);
    test_fill(ctx);
    test_budget(ctx);
    test_window(ctx); // what it lets go of does not come back
    llama_free(ctx);
    llama_model_free(model);
    printf("%d failed\n", n_failed);
    return n_failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
