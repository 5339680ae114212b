// A model with a mixed cache, from C: a text is evaluated, its rows go from one sequence to another, and both go on
// with the same token.
//
// example MODEL

#include <llama.h>
#include <mixedkv/mixedkv.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TOKENS = 256, MAX_LAYERS = 256 };

// A call that fails has left the reason on this thread.
static void check(enum mixedkv_status status) {
    if (status != MIXEDKV_OK) {
        fprintf(stderr, "status %d: %s\n", status, mixedkv_last_error());
        exit(EXIT_FAILURE);
    }
}

static void * reserve(size_t size) {
    void * res = malloc(size > 0 ? size : 1);
    if (!res) {
        fprintf(stderr, "out of memory\n");
        exit(EXIT_FAILURE);
    }
    return res;
}

// Logits after the last of these tokens.
static const float * evaluate(struct llama_context * ctx, const llama_token * tokens, int n, int first, int seq) {
    struct llama_batch batch = llama_batch_init(n, 0, 1);

    batch.n_tokens = n;
    for (int i = 0; i < n; i++) {
        batch.token[i]     = tokens[i];
        batch.pos[i]       = first + i;
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = seq;
        batch.logits[i]    = i == n - 1;
    }
    const int failed = llama_decode(ctx, batch);
    llama_batch_free(batch);
    if (failed) {
        fprintf(stderr, "llama_decode: %d\n", failed);
        exit(EXIT_FAILURE);
    }
    return llama_get_logits_ith(ctx, -1);
}

static struct llama_context * make_context(struct llama_model * model) {
    const struct mixedkv_config config = {
        .mixed = true, .threshold = 32, .group_size = 8, .sink_tokens = 4, .attention = MIXEDKV_ATTENTION_AUTO
    };
    struct llama_context_params params = llama_context_default_params();

    params.n_ctx     = 2 * MAX_TOKENS;
    params.n_seq_max = 2;
    params.type_k    = GGML_TYPE_Q4_0; // of what is older than the window
    params.type_v    = GGML_TYPE_Q4_0;

    check(mixedkv_check(model, &config, params.type_k, params.type_v, MAX_TOKENS));
    check(mixedkv_configure_next(&config)); // taken by the next context of this thread
    struct llama_context * ctx = llama_init_from_model(model, params);
    if (!ctx) {
        fprintf(stderr, "no context: %s\n", mixedkv_last_error());
        exit(EXIT_FAILURE);
    }
    return ctx;
}

static void print_stats(struct llama_context * ctx) {
    struct mixedkv_stats stats;

    check(mixedkv_get_stats(ctx, &stats));
    printf("stats: %u layers, %u of %u tokens hot, %.2f bits per element\n", stats.n_layer, stats.n_cells_hot,
           stats.n_cells_used, 8.0 * (double)stats.bytes_total / (double)stats.n_elements);
}

// One layer in F32, as the query at the last position reads it.
static void print_rows(struct llama_context * ctx, const struct mixedkv_layer_info * layer) {
    uint32_t n_rows = 0;

    check(mixedkv_read_rows(ctx, layer->il, 0, 'k', 0, -1, true, NULL, NULL, NULL, 0, &n_rows));
    float *   data = reserve(sizeof(float) * n_rows * layer->n_head_kv * layer->n_embd_head_k);
    uint8_t * hot  = reserve(n_rows);
    check(mixedkv_read_rows(ctx, layer->il, 0, 'k', 0, -1, true, data, NULL, hot, n_rows, &n_rows));
    printf("rows: layer %d has %u keys in %s, the last one is %s and begins with %.3f\n", layer->il, n_rows,
           ggml_type_name(layer->type_k), hot[n_rows - 1] ? "hot" : "cold",
           (double)data[(size_t)(n_rows - 1) * layer->n_head_kv * layer->n_embd_head_k]);
    free(data);
    free(hot);
}

// All rows of sequence 0 to sequence 1. Models without a sliding window have one group of layers.
static void copy_rows(struct llama_context * ctx, const struct mixedkv_layer_info * layers, uint32_t n_layers) {
    uint32_t n_rows = 0;
    uint32_t n_hot  = 0;

    check(mixedkv_count_rows(ctx, 0, 0, 0, -1, &n_rows, &n_hot));
    int32_t * positions = reserve(sizeof(int32_t) * n_rows);
    int32_t * hot       = reserve(sizeof(int32_t) * n_hot);
    int32_t * slots     = reserve(sizeof(int32_t) * n_hot);
    check(mixedkv_export_group(ctx, 0, 0, 0, -1, n_rows, n_hot, positions, hot, slots, NULL));

    struct mixedkv_layer_rows rows[MAX_LAYERS];
    for (uint32_t i = 0; i < n_layers; i++) {
        const struct mixedkv_layer_info l     = layers[i];
        const int64_t                   n_k   = (int64_t)l.n_head_kv * l.n_embd_head_k;
        const int64_t                   n_v   = (int64_t)l.n_head_kv * l.n_embd_head_v;
        void *                          k     = reserve(n_rows * ggml_row_size(l.type_k, n_k));
        void *                          v     = reserve(n_rows * ggml_row_size(l.type_v, n_v));
        void *                          k_hot = reserve(n_hot * ggml_row_size(GGML_TYPE_F16, n_k));
        void *                          v_hot = reserve(n_hot * ggml_row_size(GGML_TYPE_F16, n_v));
        check(mixedkv_export_layer(ctx, 0, l.il, 0, -1, n_rows, n_hot, k, v, k_hot, v_hot));
        rows[i] = (struct mixedkv_layer_rows){ l.il,
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
    const struct mixedkv_row_group group = { n_rows, n_hot, positions, hot, slots, n_layers, rows, NULL };
    check(mixedkv_import_rows(ctx, 1, &group, 1, 0, -1));
    printf("copy: %u rows, %u of them hot, from sequence 0 to sequence 1\n", n_rows, n_hot);

    for (uint32_t i = 0; i < n_layers; i++) {
        free((void *)rows[i].k);
        free((void *)rows[i].v);
        free((void *)rows[i].k_hot);
        free((void *)rows[i].v_hot);
    }
    free(positions);
    free(hot);
    free(slots);
}

static void compare(struct llama_context * ctx, int n_vocab, llama_token token, int position) {
    const size_t size  = sizeof(float) * (size_t)n_vocab;
    float *      first = reserve(size);

    memcpy(first, evaluate(ctx, &token, 1, position, 0), size);
    const int same = memcmp(first, evaluate(ctx, &token, 1, position, 1), size) == 0;
    int       best = 0;
    for (int i = 1; i < n_vocab; i++) {
        best = first[i] > first[best] ? i : best;
    }
    printf("next: the logits of both sequences are %s, token %d is the likeliest, at %.3f\n",
           same ? "the same bits" : "different", best, first[best]);
    free(first);
    if (!same) {
        exit(EXIT_FAILURE);
    }
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s MODEL\n", argv[0]);
        return EXIT_FAILURE;
    }
    printf("mixedkv %s on %s, llama.cpp %.9s\n", mixedkv_version(), mixedkv_isa(), mixedkv_llama_commit());

    llama_backend_init();
    struct llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) {
        return EXIT_FAILURE;
    }
    const struct llama_vocab * vocab = llama_model_get_vocab(model);
    struct llama_context *     ctx   = make_context(model);

    const char * text = "The quick brown fox jumps over the lazy dog. The five boxing wizards jump quickly, and the "
                        "wizards who box know that a quick brown fox is never as lazy as the dog it jumps over.";
    llama_token  tokens[MAX_TOKENS];
    const int    n = llama_tokenize(vocab, text, (int32_t)strlen(text), tokens, MAX_TOKENS, true, false);
    if (n < 2) {
        return EXIT_FAILURE;
    }
    evaluate(ctx, tokens, n - 1, 0, 0);
    print_stats(ctx);

    struct mixedkv_layer_info layers[MAX_LAYERS];
    uint32_t                  n_layers = 0;
    check(mixedkv_get_layers(ctx, layers, MAX_LAYERS, &n_layers));
    print_rows(ctx, &layers[0]);
    copy_rows(ctx, layers, n_layers);
    compare(ctx, llama_vocab_n_tokens(vocab), tokens[n - 1], n - 1);

    const enum mixedkv_status status = mixedkv_set_window(ctx, 8, 1000, 4); // more leave together than there are
    printf("status %d: %s\n", status, mixedkv_last_error());

    llama_free(ctx);
    llama_model_free(model);
    llama_backend_free();
    return status == MIXEDKV_INVALID ? EXIT_SUCCESS : EXIT_FAILURE;
}
