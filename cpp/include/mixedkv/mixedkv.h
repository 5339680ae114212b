// C API of the mixed-precision KV cache, exported by the patched libllama.
//
// Plain C, no exception crosses it. A call that fails returns a status other than
// MIXEDKV_OK and leaves a message for mixedkv_last_error() on the calling thread.
// One thread at a time evaluates with a context, or reads or moves its rows: llama_decode(), llama_encode() and the
// state functions wait for it to be done, those of this file return MIXEDKV_BUSY. llama.cpp's other functions do
// neither: call them on the thread that decodes, or between mixedkv_enter() and mixedkv_leave().

#pragma once

#include "llama.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum mixedkv_status {
    MIXEDKV_OK            = 0,
    MIXEDKV_INVALID       = 1, // an argument is wrong: the message names it and the remedy
    MIXEDKV_UNSUPPORTED   = 2, // the model or the context cannot have this cache
    MIXEDKV_NOT_AVAILABLE = 3, // the context has no such cache, layer or sequence
    MIXEDKV_INTERNAL      = 4, // an invariant of this library does not hold: please report it
    MIXEDKV_BUSY          = 5, // another thread is using the context; nothing was done
    MIXEDKV_UNREADABLE    = 6, // the model's file cannot be read any more: the message names it
    MIXEDKV_INTERRUPTED   = 7, // mixedkv_stream_config::stop said so, or the context's abort_callback
};

enum mixedkv_attention {
    MIXEDKV_ATTENTION_AUTO   = 0, // mixed: fused where the layer's cache lies in CPU memory, else merged
    MIXEDKV_ATTENTION_FUSED  = 1, // one CPU node reads cold and hot rows directly
    MIXEDKV_ATTENTION_MERGED = 2, // llama.cpp's own attention over one F16 view of all rows, any backend
};

// A ggml_type beside ggml's own: 4.25 bits an element, in blocks of 64, for rows of this library's caches.
#define MIXEDKV_TYPE_LM4 38

// Another, of 3.25 bits.
#define MIXEDKV_TYPE_TC3 36

// Cold types of some layers.
struct mixedkv_layer_types {
    int32_t        first;
    int32_t        last; // the last one of them, -1: the model's
    enum ggml_type type_k;
    enum ggml_type type_v;
};

// What the next context made on this thread gets. The cold types of layers that `layers` does not name are the
// context's type_k and type_v, which also decide for all layers whether rows are rotated.
struct mixedkv_config {
    bool                   mixed;       // false: llama.cpp's uniform cache; of the rest only `attention` applies
    uint32_t               threshold;   // T: hot tokens per sequence at most; the F16 ring has room for them
    uint32_t               group_size;  // G: once there are more than T, the oldest G leave together
    uint32_t               sink_tokens; // the first positions of a sequence, kept hot for good
    enum mixedkv_attention attention;
    uint32_t               n_draft;    // tokens that may be taken back as if they had never come: so many more F16 rows
    uint32_t               hot_budget; // F16 rows that all sequences of the context share, or one of these two

    // Fused decode: of older keys those pages of 4 are read that weigh much, and a random sample of the others, so that
    // a row's sum of weights has this standard error, relative to it, or less; 0: all are read.
    float sparse_error;

    const struct mixedkv_layer_types * layers; // [n_layers], no layer twice; copied
    uint32_t                           n_layers;
};

#define MIXEDKV_HOT_BUDGET_AUTO 0u // windows for half of the sequences, in a quarter to a half of the cold rows' bytes
#define MIXEDKV_HOT_BUDGET_ALL  UINT32_MAX // a window for every sequence

// A cache as a spec names it.
struct mixedkv_spec {
    struct mixedkv_config config; // for mixedkv_configure_next()
    enum ggml_type        type_k; // for llama_context_params
    enum ggml_type        type_v;
    uint64_t              budget_bytes; // that the cache may take, and bits of an element that its cold rows may have.
    double                budget_bits;  // Both 0: the types stand. Else they are to be chosen for a model first
};

// One layer as the cache stores it.
struct mixedkv_layer_info {
    int32_t        il;        // layer index in the model
    bool           mixed;     // false: llama.cpp's uniform cache
    bool           fused;     // attention reads the rows as they lie, with the fused node
    bool           on_device; // which a device computes: CUDA
    bool           in_place;  // llama.cpp's own attention on a device reads the rows as they lie: Vulkan
    uint32_t       n_head_kv;
    uint32_t       n_embd_head_k;
    uint32_t       n_embd_head_v;
    uint32_t       n_cells; // rows over all streams
    enum ggml_type type_k;
    enum ggml_type type_v;
    uint32_t       rotation_k; // edge of the Hadamard blocks that the rows are rotated by, 0: they are not
    uint32_t       rotation_v;
    uint32_t       equalization; // tells the scales of K apart; 0: there are none
    uint32_t       group;        // layers of one group hold the same positions
    uint64_t       bytes_cold;   // K and V, capacity
    uint64_t       bytes_hot;    // K and V of the F16 ring, capacity
    uint32_t       n_swa;        // tokens that the layer's sliding window sees, older rows may be gone; 0: it keeps all
};

// One sequence, as the query at its last position sees it.
struct mixedkv_seq_info {
    int32_t seq_id;
    int32_t pos_min; // -1: the sequence is empty
    int32_t pos_max;
    int32_t hot_begin;  // first position of the recent window, pos_max + 1 when it is empty
    int32_t n_hot;      // live rows that attention reads in F16
    int32_t n_cold;     // live rows that attention reads in the cold type
    int32_t short_from; // first position that was evaluated without an F16 row of its window, -1: none
};

// What a row is, from best to worst. A token is at most as good as the worst that it attended to.
enum mixedkv_validity {
    MIXEDKV_COMPUTED    = 0, // as evaluating its tokens from the first one gives it
    MIXEDKV_APPROXIMATE = 1, // moved, converted, computed under another setting than the present, or behind rows that
                             // were not read in F16 as they should have been
    MIXEDKV_INCOMPLETE  = 2, // tokens before it were missing
    MIXEDKV_FOREIGN     = 3, // another program made it
    MIXEDKV_UNVERIFIED  = 4, // nothing is known of it: from a state, or a block that does not say
};

// Where a sequence can be cut at most, up to a number of tokens: the next token then finds all that it reads.
struct mixedkv_cut {
    int32_t n;        // for all layers together; 0: only anew
    int32_t n_full;   // for layers that keep all rows: without a gap from the first position on
    int32_t n_window; // for layers with a sliding window: with all rows that it sees
    int32_t n_state;  // for recurrent layers: where their state stands, or a snapshot of it
    bool    has_hot;  // cut where it was asked for, the next token finds every key of its window in F16
};

struct mixedkv_stats {
    bool     mixed;
    uint32_t n_ctx_seq; // cells per stream
    uint32_t n_seq_max;
    uint32_t n_stream;
    uint32_t n_layer; // layers with a KV cache
    uint32_t threshold;
    uint32_t threshold_capacity; // as many as the F16 ring has room for in one sequence; a wider window allocates
    uint32_t group_size;
    uint32_t sink_tokens;
    uint32_t n_draft;
    uint32_t ring_rows;    // F16 rows per stream, padding included
    uint32_t n_cells_used; // live cells over all streams of the full-attention cache
    uint32_t n_cells_hot;  // of these, those that are read in F16
    uint32_t hot_slots;    // F16 rows that the sequences of the context share
    bool     hot_shared;   // these are less than a window for every sequence
    uint64_t n_evicted;    // F16 rows that made room for others before their window had let go of them
    uint64_t n_pages;      // pages of keys, by KV heads and queries, of which decode chose those to read
    uint64_t n_pages_read; // of these, those that it read
    uint64_t n_elements;   // K and V elements of all cells: what bits per element divides by
    uint64_t bytes_total;  // from llama.cpp's own memory breakdown of the KV cache, and bytes_view
    uint64_t bytes_cold;
    uint64_t bytes_hot;        // as allocated
    uint64_t bytes_given_back; // beside these, what the system has back while windows are shorter
    uint64_t bytes_view;       // of the compute buffers: the F16 view of a layer's rows, 0 if no layer has one
    uint64_t bytes_compute;    // all compute buffers of the context
};

// Which llama.cpp the library was built from, and what it can run on this machine.
LLAMA_API const char * mixedkv_version(void);      // e.g. "0.1.0"
LLAMA_API const char * mixedkv_llama_commit(void); // e.g. "0c1e57098..."
LLAMA_API const char * mixedkv_isa(void);          // instruction set the kernels dispatch to, e.g. "avx512"
LLAMA_API const char * mixedkv_last_error(void);   // of this thread, "" when the last call succeeded

// Reads a spec: "mixed", "mixed:balanced", "mixed:cold=lm4,threshold=128", "f16", "q8_0/q4_0", as Python's `kv` has
// them. config.layers stays readable until this thread's next call.
LLAMA_API enum mixedkv_status mixedkv_parse(const char * spec, struct mixedkv_spec * out);

// Says without making a context whether the model can have this cache. n_ctx is per sequence. Types may be any number:
// those that do not exist are refused, and those that rows are not quantised to without an importance matrix (IQ2_XXS).
LLAMA_API enum mixedkv_status mixedkv_check(const struct llama_model * model, const struct mixedkv_config * config,
                                            enum ggml_type type_k, enum ggml_type type_v, uint32_t n_ctx);

// The next llama_init_from_model() on this thread takes the configuration, whether it succeeds or not.
// NULL withdraws it.
LLAMA_API enum mixedkv_status mixedkv_configure_next(const struct mixedkv_config * config);

// Other threads stay out until this one has left as often as it entered: for several calls that belong together. wait:
// until there is nobody else; otherwise MIXEDKV_BUSY where there is. A context is not freed while a thread is inside.
LLAMA_API enum mixedkv_status mixedkv_enter(struct llama_context * ctx, bool wait);
LLAMA_API enum mixedkv_status mixedkv_leave(struct llama_context * ctx);

// Which tokens' logits are wanted of llama_decode() from here on: a bit for each token of the vocabulary, n words of
// them. Others may be minus infinity. NULL: all are wanted.
LLAMA_API enum mixedkv_status mixedkv_want_logits(struct llama_context * ctx, const uint32_t * tokens, uint32_t n);

// A sequence whose evaluation gave values that are no numbers: NaN, or infinite.
struct mixedkv_not_finite {
    int32_t seq_id;
    int32_t pos; // the first such token; rows from there on are MIXEDKV_UNVERIFIED
};

// The sequences that gave such values since they were last taken; all entries are forgotten once n is enough for them.
// Remove each from that position on, and then call mixedkv_clear_unused().
LLAMA_API enum mixedkv_status mixedkv_take_not_finite(struct llama_context * ctx, struct mixedkv_not_finite * out,
                                                      uint32_t n, uint32_t * n_out);

// Zeroes what the cells hold that no sequence has. Attention of llama.cpp multiplies them by 0, and 0 times NaN is NaN.
LLAMA_API enum mixedkv_status mixedkv_clear_unused(struct llama_context * ctx);

LLAMA_API enum mixedkv_status mixedkv_get_stats(struct llama_context * ctx, struct mixedkv_stats * out);

// Fill up to n entries; *n_out is how many there are. `out` may be NULL when n is 0.
LLAMA_API enum mixedkv_status mixedkv_get_layers(struct llama_context * ctx, struct mixedkv_layer_info * out,
                                                 uint32_t n, uint32_t * n_out);
LLAMA_API enum mixedkv_status mixedkv_get_sequences(struct llama_context * ctx, struct mixedkv_seq_info * out,
                                                    uint32_t n, uint32_t * n_out);

// mixedkv_seq_info::short_from of every sequence, and nothing else: cheap enough for every step.
LLAMA_API enum mixedkv_status mixedkv_get_short(struct llama_context * ctx, int32_t * out, uint32_t n,
                                                uint32_t * n_out);

// Whether a token of the sequence that is evaluated at `pos` next finds every key of its window in F16, in all layers.
LLAMA_API enum mixedkv_status mixedkv_window_is_whole(struct llama_context * ctx, int32_t seq_id, int32_t pos,
                                                      bool * out);

// Where a sequence can be cut at n tokens or before. Cells and states are looked at: which rows layers with a sliding
// window have let go of follows from no setting.
LLAMA_API enum mixedkv_status mixedkv_find_cut(struct llama_context * ctx, int32_t seq_id, int32_t n,
                                               struct mixedkv_cut * out);

// Leading rows of a sequence that are MIXEDKV_COMPUTED in all layers; INT32_MAX where layers keep no rows. Those at
// [p0, p0 + n) count if they are of these tokens. Pending shifts and copies are carried out first, as the next decode
// would.
LLAMA_API enum mixedkv_status mixedkv_count_computed(struct llama_context * ctx, int32_t seq_id, int32_t p0,
                                                     const llama_token * tokens, uint32_t n, int32_t * out);

// What the rows of a sequence at [p0, p0 + n) are, n of them: the worst of all layers. MIXEDKV_UNVERIFIED where a row
// is of another token than the given one, or is not there.
LLAMA_API enum mixedkv_status mixedkv_get_validity(struct llama_context * ctx, int32_t seq_id, int32_t p0,
                                                   const llama_token * tokens, uint32_t n, enum mixedkv_validity * out);

// Hashes of the tokens of a sequence's rows before p0, before p0 + 1 and so on, n of them: what rows from there on are
// computed from. 0: there are none.
LLAMA_API enum mixedkv_status mixedkv_get_past(struct llama_context * ctx, int32_t seq_id, int32_t p0, uint32_t n,
                                               uint64_t * out);

// The same behind n more tokens.
LLAMA_API uint64_t mixedkv_extend_past(uint64_t past, const llama_token * tokens, uint32_t n);

// Records what rows of a sequence at [p0, p0 + n) are, of which tokens, under which setting and behind which past they
// were computed: rows that came from outside are MIXEDKV_UNVERIFIED until then. Behind another past, and under another
// setting than the present one, they are MIXEDKV_APPROXIMATE at best. setting: of mixedkv_get_setting(); NULL: it is
// not known.
LLAMA_API enum mixedkv_status mixedkv_set_validity(struct llama_context * ctx, int32_t seq_id, int32_t p0,
                                                   uint64_t past, const llama_token * tokens, uint32_t n,
                                                   enum mixedkv_validity validity, const char * setting);

// How rows are computed: a text of all that shapes them besides their tokens, as adapters, RoPE, types of rows, window
// and kind of attention are now. Rows of two contexts are the same, but for rounding, where their texts are. p < 0: of
// rows computed next, which any thread may ask; otherwise of the row of a sequence at p, "" where nobody says. Valid
// until this thread's next call.
LLAMA_API enum mixedkv_status mixedkv_get_setting(struct llama_context * ctx, int32_t seq_id, int32_t p,
                                                  const char ** out);

// What the text begins with: a name for the model's weights and metadata, as a hash of its file. Without it, rows of
// different models are told apart by the caller alone. Give it before rows come in or leave.
LLAMA_API enum mixedkv_status mixedkv_name_model(struct llama_context * ctx, const char * name);

// Rows of a sequence at [p0, p1) are no better than this; p1 < 0 means the end.
LLAMA_API enum mixedkv_status mixedkv_limit_validity(struct llama_context * ctx, int32_t seq_id, int32_t p0, int32_t p1,
                                                     enum mixedkv_validity validity);

// Why the context's latest evaluation was refused, since rows that its tokens read are missing: then llama_decode()
// returned -3, and the cache is as it was before that micro-batch. "": it was not.
LLAMA_API const char * mixedkv_refused(struct llama_context * ctx);

// Why an exact answer may have other bits when its prompt is evaluated in other steps, lies in other cells or beside
// others; "": it has the same, with this model, this cache and the instruction set at hand. LoRA adapters are not
// looked at. The text holds until the next call on this thread.
LLAMA_API const char * mixedkv_bits_problem(struct llama_context * ctx);

// Sets *out to whether this process has GPUs and all of them can read cold rows of these types and heads without a
// copy, those included that llama.cpp would leave out. Otherwise attention makes an F16 view there
// (mixedkv_stats.bytes_view), as it always does for latent rows (MLA) and for biases of K. False for sizes and counts
// that no model has.
LLAMA_API enum mixedkv_status mixedkv_gpus_read(enum ggml_type type_k, enum ggml_type type_v, uint32_t n_embd_head_k,
                                                uint32_t n_embd_head_v, uint32_t n_head, uint32_t n_head_kv,
                                                bool * out);

// F16 rows that a cache of n_cells for n_seq sequences allocates, for a token that takes so many bytes in all layers,
// cold and in F16. *least_out is the least hot_budget that it takes.
LLAMA_API enum mixedkv_status mixedkv_count_ring_rows(const struct mixedkv_config * config, uint32_t n_seq,
                                                      uint32_t n_cells, uint64_t bytes_cold, uint64_t bytes_f16,
                                                      uint32_t * n_out, uint32_t * least_out);

// What K of a layer is stored times: F32 [n_head_kv, n_embd_head_k], *n_out of them; 0: K is stored as it is. Up to n
// are written.
LLAMA_API enum mixedkv_status mixedkv_get_scales(struct llama_context * ctx, int32_t il, float * out, uint32_t n,
                                                 uint32_t * n_out);

// For tests: makes the sketches of `sparse_error` again, of all strips of 16 keys, and tells how many there are, by
// layers, and in how many layers what is kept is not the same.
LLAMA_API enum mixedkv_status mixedkv_check_pages(struct llama_context * ctx, uint32_t * n_pages, uint32_t * n_wrong);

// Live settings of a mixed cache. Rows that are there were computed under others: they are MIXEDKV_APPROXIMATE until
// these are set again. What has aged out stays cold; a wider window fills from new tokens. Rows move in the F16 ring,
// and pages of CPU memory that are left over go back. A window that the ring has no room for gets a larger ring;
// without memory for it the call fails and the window stays as it was.
LLAMA_API enum mixedkv_status mixedkv_set_window(struct llama_context * ctx, uint32_t threshold, uint32_t group_size,
                                                 uint32_t sink_tokens);

// Nothing of the sequence is evaluated for now: its F16 rows count as free, and make room for those of other sequences
// at once and not after 16 steps. What it held can be taken out before, see mixedkv_restore_window().
LLAMA_API enum mixedkv_status mixedkv_release_hot_rows(struct llama_context * ctx, int32_t seq_id);

// The sequence goes on, though others may be evaluated before it: from now on its F16 rows do not count as free.
LLAMA_API enum mixedkv_status mixedkv_hold_hot_rows(struct llama_context * ctx, int32_t seq_id);

// How many sequences of a unified context layers with a sliding window have room for, of the next ones that this thread
// makes; 0: for all, as upstream. With a limit, the caller drops the windows of idle sequences.
LLAMA_API void mixedkv_limit_sliding(uint32_t n_windows);

// Layers with a sliding window let go of all rows of a sequence, whose other rows stay: see mixedkv_restore_window().
LLAMA_API enum mixedkv_status mixedkv_drop_sliding(struct llama_context * ctx, int32_t seq_id);

// Pending shifts and copies of the context are carried out first, as the next decode would.
// Rows of one layer and sequence in order of position, as the query at the last position reads them.
// `which` is 'k' or 'v'. data: F32 [n_rows, n_head_kv, n_embd_head]; positions, hot: [n_rows]; any may be NULL.
// unrotate: undo the Hadamard rotation that llama.cpp applies to a quantised cache, and the equalisation of K.
// *n_rows_out is how many rows lie in [p0, p1); p1 < 0 means the end. Nothing is written if n_rows is smaller.
LLAMA_API enum mixedkv_status mixedkv_read_rows(struct llama_context * ctx, int32_t il, int32_t seq_id, char which,
                                                int32_t p0, int32_t p1, bool unrotate, float * data,
                                                int32_t * positions, uint8_t * hot, uint32_t n_rows,
                                                uint32_t * n_rows_out);

// Whether all rows that the context holds, in used cells or not, are numbers, which a damaged state may have changed:
// the message names a layer where they are not. Attention would then give none for any prompt, until the cache is
// cleared.
LLAMA_API enum mixedkv_status mixedkv_check_rows(struct llama_context * ctx);

// Rows of a token range on their way out of a cache or into one. All layers of a group hold the same positions: one
// group, or two where some layers have a sliding window. Rows hold all KV heads of a layer. A layer that stores no
// values (MLA) has heads of size 0 for them, and `v` is not read.
struct mixedkv_layer_rows {
    int32_t        il;
    uint32_t       n_head_kv;
    uint32_t       n_embd_head_k;
    uint32_t       n_embd_head_v;
    enum ggml_type type_k; // of k and v
    enum ggml_type type_v;
    uint32_t       rotation_k;
    uint32_t       rotation_v;
    uint32_t       equalization; // of mixedkv_layer_info
    const void *   k;            // [n_rows] rows of type_k, as the cache stores them
    const void *   v;
    const void *   k_hot; // F16 [n_hot] rows
    const void *   v_hot;
};

struct mixedkv_row_group {
    uint32_t                          n_rows;
    uint32_t                          n_hot;
    const int32_t *                   positions; // [n_rows], ascending
    const int32_t *                   hot;       // [n_hot], which rows have an F16 copy, ascending
    const int32_t *                   slots;     // [n_hot], where in the sequence's part of the ring it lay
    uint32_t                          n_layers;
    const struct mixedkv_layer_rows * layers;
    const int32_t *                   xy; // [n_rows][2], the other parts of M-RoPE positions: column and row of an
                                          // image; then several rows may share a position. NULL for other models
};

// How many rows of a group, and how many hot ones, a sequence has in [p0, p1); p1 < 0 means the end. Fails unless the
// sequence has every position of the range once; with M-RoPE an image covers as many as it has columns or rows, all
// its rows being at the first. Pending shifts and copies are carried out first, as the next decode would.
LLAMA_API enum mixedkv_status mixedkv_count_rows(struct llama_context * ctx, int32_t seq_id, uint32_t group, int32_t p0,
                                                 int32_t p1, uint32_t * n_rows_out, uint32_t * n_hot_out);

// Copies them out into arrays for the n_rows and n_hot that mixedkv_count_rows told; fails if it no longer would. xy is
// NULL but for models with M-RoPE.
LLAMA_API enum mixedkv_status mixedkv_export_group(struct llama_context * ctx, int32_t seq_id, uint32_t group,
                                                   int32_t p0, int32_t p1, uint32_t n_rows, uint32_t n_hot,
                                                   int32_t * positions, int32_t * hot, int32_t * slots, int32_t * xy);
LLAMA_API enum mixedkv_status mixedkv_export_layer(struct llama_context * ctx, int32_t seq_id, int32_t il, int32_t p0,
                                                   int32_t p1, uint32_t n_rows, uint32_t n_hot, void * k, void * v,
                                                   void * k_hot, void * v_hot);

// Puts rows into a sequence, each at its position + shift. Nothing is changed unless it succeeds. Rows of other types
// than the cache's, or with other scales of K, are converted; a shift turns K. Groups come in order of
// mixedkv_layer_info::group. Layers with a sliding window that lack room take only the rows that the next token reads.
// drop_from: rows of the sequence from this position on make room first; -1: none do. Sizes of the arrays are the
// caller's promise; everything else is checked.
LLAMA_API enum mixedkv_status mixedkv_import_rows(struct llama_context * ctx, int32_t seq_id,
                                                  const struct mixedkv_row_group * groups, uint32_t n_groups,
                                                  int32_t shift, int32_t drop_from);

// Evaluates tokens of one sequence at positions that it lacks: they see what the sequence has before them, and each
// other. Rows behind them stay as they are. positions: [n], ascending; n is n_batch at most. logits: of the last token.
// last_layer: -1; otherwise evaluation ends after the attention of this layer, rows of later ones are then whatever was
// there, and the tokens must be removed again. mass: F32 [n_mass] or NULL: the attention that these tokens pay to each
// position of the sequence is added to it, summed over tokens, heads and the deeper half of the layers. What is read in
// F16 is left out. The last two need the fused attention in every layer. Where this fails the sequence has none of the
// positions, and MIXEDKV_INTERRUPTED says that a callback or a stream broke it off: see mixedkv_stream_check().
LLAMA_API enum mixedkv_status mixedkv_fill(struct llama_context * ctx, int32_t seq_id, const llama_token * tokens,
                                           const llama_pos * positions, uint32_t n, bool logits, int32_t last_layer,
                                           float * mass, uint32_t n_mass);
// The same without shift, of rows that lack what the next token reads: more rows follow, or their window does.
LLAMA_API enum mixedkv_status mixedkv_import_part(struct llama_context * ctx, int32_t seq_id,
                                                  const struct mixedkv_row_group * groups, uint32_t n_groups);

// Gives a sequence back what it had where it stood once, for a sequence that was cut there: F16 copies of rows that it
// has, and in layers with a sliding window, where it lacks some of these rows, these instead of its own. When this
// fails the copies may be incomplete.
LLAMA_API enum mixedkv_status mixedkv_restore_window(struct llama_context * ctx, int32_t seq_id,
                                                     const struct mixedkv_row_group * groups, uint32_t n_groups);

// Weights that stay in the model's file and are read for each pass over the model. Give the buffer type to a model's
// matrices of whole layers, in llama_model_params::tensor_buft_overrides, and load it without mmap; its contexts
// then read them while they evaluate, one after the other. llama_decode() returns 2 where that fails, see
// mixedkv_stream_check().
struct mixedkv_stream;

struct mixedkv_stream_config {
    bool     prefetch;  // map the file and have pages come ahead of the pass; else: O_DIRECT into a ring of layers
    uint32_t n_slots;   // layers of the ring, 2 at least
    uint32_t n_threads; // that read
    uint64_t chunk;     // bytes of one read, a multiple of 4096
    bool (*stop)(void * data); // NULL, or asked now and then by the thread that evaluates: true ends that
    void * stop_data;
};

struct mixedkv_stream_stats {
    uint64_t bytes_read; // since the start
    uint64_t n_layers;   // that were brought
    uint64_t n_holds;    // layers that passes asked for
    uint64_t n_stalls;   // of these not there yet
    double   seconds_waiting;
    double   seconds_reading; // in which at least one thread was reading
    uint64_t bytes_ring;      // memory of the ring
    uint64_t bytes_streamed;  // what a pass reads
    bool     o_direct;        // the page cache is not used
    uint64_t n_passes;        // over the streamed layers
    double   seconds;         // that these took, each from its first streamed layer to its last
};

LLAMA_API enum mixedkv_status        mixedkv_stream_new(const struct mixedkv_stream_config * config,
                                                        struct mixedkv_stream **             out);
LLAMA_API void                       mixedkv_stream_free(struct mixedkv_stream * stream); // also before the model
LLAMA_API ggml_backend_buffer_type_t mixedkv_stream_buffer_type(struct mixedkv_stream * stream);
LLAMA_API enum mixedkv_status        mixedkv_stream_get_stats(struct mixedkv_stream *       stream,
                                                              struct mixedkv_stream_stats * out);

// How evaluations went since the last call: MIXEDKV_OK, MIXEDKV_UNREADABLE or MIXEDKV_INTERRUPTED. After the latter two
// the next evaluation begins anew; until this has been asked all fail.
LLAMA_API enum mixedkv_status mixedkv_stream_check(struct mixedkv_stream * stream);

// Keeps the ring and the weights that are not streamed, but for routed experts, in memory (mlock), as many as may be:
// bytes that are, and bytes that should be. MIXEDKV_NOT_AVAILABLE: some could not, the message has the system's reason.
LLAMA_API enum mixedkv_status mixedkv_stream_lock(struct mixedkv_stream * stream, const struct llama_model * model,
                                                  uint64_t * n_locked, uint64_t * n_bytes);

#ifdef __cplusplus
}
#endif
