// Layers of a model file that do not stay in memory: reader threads bring them, in the order in which a pass over the
// model needs them, one after the other and ahead of it. Knows nothing of llama.cpp.

#pragma once

#include "file_access.h"

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace mixedkv {

// the file, and what is wrong with it
struct read_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// who waits for a layer has been told to stop
struct interrupted_error : std::runtime_error {
    interrupted_error() : std::runtime_error("interrupted") {}
};

enum class ring_mode {
    direct,   // past the page cache into a ring of layers; through it where the file system has no way past it
    prefetch, // the file is mapped: pages come ahead of the pass and are given back behind it
};

struct ring_settings {
    ring_mode mode      = ring_mode::direct;
    size_t    n_slots   = 3; // layers in memory at a time
    size_t    n_threads = 4; // that read
    size_t    chunk     = 4 << 20;
};

struct ring_stats {
    uint64_t bytes_read; // since the start; prefetch: bytes asked for
    uint64_t n_layers;   // brought
    uint64_t n_holds;    // layers that a pass asked for
    uint64_t n_stalls;   // of these not there yet
    double   seconds_waiting;
    double   seconds_reading; // at least one thread was reading
    uint64_t bytes_ring;      // memory of the ring
    uint64_t bytes_streamed;  // of all layers: what a pass reads
    bool     o_direct;        // every file is read past the page cache
};

class layer_ring {
  public:
    explicit layer_ring(ring_settings settings);
    ~layer_ring();

    layer_ring(const layer_ring &) = delete;

    // The file behind an open descriptor, again and for good: a file that takes its name meanwhile changes nothing.
    size_t add_file(int fd);

    // Bytes of a file belong to a layer. All before start().
    void add(size_t layer, size_t file, uint64_t offset, uint64_t size);
    void start();

    // Where these bytes lie once their layer is held: at hold() + this. After start().
    size_t where(size_t layer, size_t file, uint64_t offset) const;

    // The layer's bytes, as soon as they are there. Asked now and then, `stop` ends the wait.
    // Raises read_error, interrupted_error.
    const uint8_t * hold(size_t layer, const std::function<bool()> & stop);
    // The pass is done with it.
    void            release(size_t layer);

    // Bytes of a file by themselves, past the ring. Raises read_error.
    void read(size_t file, uint64_t offset, uint64_t size, void * to);

    size_t     n_layers() const { return layers.size(); }
    ring_stats stats();
    // Pages of the ring stay in memory; 0, or errno.
    int        lock();

  private:
    struct file {
        std::string name;
        system_file buffered; // through the page cache
        system_file direct;   // past it; NO_FILE: that cannot be had
        file_status status;
        uint8_t *   mapped;
    };

    // consecutive bytes of a file, whole blocks of it, and where in a slot they go
    struct run {
        size_t   file;
        uint64_t offset, end;
        size_t   at;
    };

    struct layer {
        std::vector<run> runs;
        size_t           size; // of a slot
    };

    enum class state { empty, coming, there, held, left };

    struct slot {
        uint8_t * data   = nullptr;
        size_t    layer  = 0;
        state     is     = state::empty;
        size_t    n_left = 0; // chunks that are not read
        size_t    n_busy = 0; // of these being read
    };

    struct chunk {
        size_t   slot, file;
        uint64_t offset, end;
        size_t   at;
    };

    slot * find(size_t layer);
    void   plan();
    void   refill(std::unique_lock<std::mutex> & lock, size_t layer);
    void   work();
    void   bring(const chunk & what);
    void   bring_mapped(const chunk & what);
    void   leave(const slot & which);
    void   pread_all(file & from, uint64_t offset, uint64_t end, uint64_t least, uint8_t * to);
    void   check(const file & of) const;

    const ring_settings settings;

    std::vector<file>  files;
    std::vector<layer> layers;
    std::vector<slot>  slots;
    uint8_t *          memory   = nullptr;
    size_t             n_memory = 0;

    std::mutex               mutex;
    std::condition_variable  wanted, arrived;
    std::deque<chunk>        todo;
    std::vector<std::thread> threads;
    std::string              failed;            // why, "": not
    size_t                   next          = 0; // layer to bring
    size_t                   n_reading     = 0;
    double                   reading_since = 0;
    bool                     ending        = false;
    ring_stats               counts        = {};
    std::atomic<bool>        buffered{ false }; // O_DIRECT could be opened, but not read
};

} // namespace mixedkv
