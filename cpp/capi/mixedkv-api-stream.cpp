// The C API: weights that are read for each pass.

#include "mixedkv-api.h"

#include "model/stream.h"

#include <cstring>

using namespace mixedkv_api;

struct mixedkv_stream {
    std::shared_ptr<llama_stream> self;
};

mixedkv_status mixedkv_stream_new(const mixedkv_stream_config * config, mixedkv_stream ** out) {
    return guarded([&] {
        require(config && out, MIXEDKV_INVALID, "config or out is NULL");
        require(config->n_slots >= 2, MIXEDKV_INVALID, "a ring has 2 layers at least");
        require(config->n_threads >= 1 && config->n_threads <= 64, MIXEDKV_INVALID, "1 to 64 threads read");
        require(config->chunk > 0 && config->chunk % 4096 == 0, MIXEDKV_INVALID, "chunk is no multiple of 4096");

        mixedkv::ring_settings settings;
        settings.mode      = config->prefetch ? mixedkv::ring_mode::prefetch : mixedkv::ring_mode::direct;
        settings.n_slots   = config->n_slots;
        settings.n_threads = config->n_threads;
        settings.chunk     = config->chunk;

        std::function<bool()> stop;
        if (config->stop) {
            stop = [stop = config->stop, data = config->stop_data] { return stop(data); };
        }
        *out = new mixedkv_stream{ std::make_shared<llama_stream>(settings, std::move(stop)) };
    });
}

void mixedkv_stream_free(mixedkv_stream * stream) {
    delete stream;
}

ggml_backend_buffer_type_t mixedkv_stream_buffer_type(mixedkv_stream * stream) {
    return stream ? stream->self->get_buft() : nullptr;
}

mixedkv_status mixedkv_stream_get_stats(mixedkv_stream * stream, mixedkv_stream_stats * out) {
    return guarded([&] {
        require(stream && out, MIXEDKV_INVALID, "stream or out is NULL");

        const auto s = stream->self->get_stats();

        *out = { s.bytes_read,
                 s.n_layers,
                 s.n_holds,
                 s.n_stalls,
                 s.seconds_waiting,
                 s.seconds_reading,
                 s.bytes_ring,
                 s.bytes_streamed,
                 s.o_direct,
                 stream->self->get_n_passes(),
                 stream->self->get_seconds() };
    });
}

mixedkv_status mixedkv_stream_check(mixedkv_stream * stream) {
    return guarded([&] {
        require(stream, MIXEDKV_INVALID, "stream is NULL");

        std::string reason;
        const auto  res = stream->self->take_outcome(reason);
        require(res != llama_stream::outcome::unreadable, MIXEDKV_UNREADABLE, reason);
        require(res != llama_stream::outcome::interrupted, MIXEDKV_INTERRUPTED, reason);
    });
}

mixedkv_status mixedkv_stream_lock(mixedkv_stream * stream, const llama_model * model, uint64_t * n_locked,
                                   uint64_t * n_bytes) {
    return guarded([&] {
        require(stream && model && n_locked && n_bytes, MIXEDKV_INVALID, "an argument is NULL");

        const int problem = stream->self->lock(*model, *n_locked, *n_bytes);
        require(problem == 0, MIXEDKV_NOT_AVAILABLE, strerror(problem));
    });
}
