#pragma once

// Weights of a model that stay in its file and are read for each pass: docs/decisions/034-layers-stream-through-a-ring.md.

#include "model/eval-listener.h"

#include "streaming/layer_ring.h"

#include "ggml-backend.h"
#include "llama.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

// The buffer type of one model's streamed weights, and what brings them while a graph is evaluated. A model's buffers of
// this type keep it alive. Contexts of the model take turns, a graph at a time: there is one ring, and one address of a weight.
class llama_stream : public llama_eval_listener, public std::enable_shared_from_this<llama_stream> {
public:
    // stop: asked now and then by the thread that evaluates; true ends the evaluation
    llama_stream(mixedkv::ring_settings settings, std::function<bool()> stop);
    ~llama_stream();

    // what a model's weights are given to, in llama_model_params::tensor_buft_overrides, if they are to be streamed
    ggml_backend_buffer_type_t get_buft() { return type.get(); }

    mixedkv::ring_stats get_stats() { return ring.stats(); }

    // passes over the streamed layers, and the time they took: from the first one to the last one
    uint64_t get_n_passes() const { return n_passes; }
    double   get_seconds()  const { return seconds; }

    enum class outcome { good, unreadable, interrupted };

    // of the evaluations since the last call, and why; after another than good the next one begins anew
    outcome take_outcome(std::string & reason);

    // Keeps the ring and the model's other weights, but for routed experts, in memory: bytes that are, bytes that should be; 0 or errno.
    int lock(const llama_model & model, uint64_t & n_locked, uint64_t & n_bytes);

    // brings each layer, and gives it back; a graph that lacks one fails
    bool    before(ggml_tensor * node) override;
    verdict after (ggml_tensor * node) override;
    void    end_graph() override;

    // the calls of the functions below
    void take(ggml_tensor * tensor, int fd, uint64_t offs);
    std::string admit(llama_context_params & params);
    bool read(const ggml_tensor * tensor, void * to, uint64_t offs, uint64_t size);

    // nullptr: these weights are no stream's
    static llama_stream * of(const ggml_tensor * tensor);

private:
    struct weight {
        ggml_tensor * tensor;
        int32_t       il;
        size_t        file;
        uint64_t      offs;
        size_t        layer = 0;
        size_t        where = 0;
        void *        home  = nullptr; // as long as it is not there
        uint64_t      seen  = 0;       // in this hold of its layer
    };

    struct layer {
        std::vector<weight *> weights;
        size_t                n_seen = 0;
        uint64_t              hold   = 0;
    };

    void start();
    bool use(weight & w);
    void count(size_t layer);
    void count();
    void fail(outcome how, const std::string & why);

    mixedkv::layer_ring         ring;
    const std::function<bool()> stop;

    std::unique_ptr<ggml_backend_buffer_type> type;

    std::unordered_map<int, size_t>                 files; // by descriptor
    std::unordered_map<const ggml_tensor *, weight> weights;
    std::vector<layer>                              layers;
    std::vector<size_t>                             held; // in the order in which they were asked for

    bool        started = false;
    uint64_t    n_holds = 0;

    std::mutex                   turn; // to evaluate
    std::atomic<std::thread::id> whose{ std::thread::id() };

    std::atomic<uint64_t> n_passes{ 0 };
    std::atomic<double>   seconds{ 0.0 };
    size_t                latest = 0; // layer
    double                mark   = 0.0;

    outcome     last    = outcome::good;
    std::string problem;
};

// llama_model_loader, about to read these weights: they stay in their file, and count as read
bool llama_stream_takes(ggml_tensor * tensor, int fd, size_t offs, size_t & size_done);

// llama_init_from_model: readies the model's stream, if it has one, for its context; "" or why that cannot be
std::string llama_stream_admit(const llama_model & model, llama_context_params & params);

// llama_eval_chain: the model's stream, which listens to its context; nullptr: it has none
llama_eval_listener * llama_stream_listener(const llama_model & model);

// Weights that are needed outside an evaluation: read for as long as this is there.
class llama_stream_loan {
public:
    explicit llama_stream_loan(ggml_tensor * tensor);
    ~llama_stream_loan();

    llama_stream_loan(const llama_stream_loan &) = delete;

private:
    ggml_tensor *        tensor;
    void *               home;
    std::vector<uint8_t> data;
};
