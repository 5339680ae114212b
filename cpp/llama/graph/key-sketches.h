#pragma once

// Sketches of keys, of layers whose attention may leave some out: see docs/decisions/040. A strip's rows are all that its
// sketch depends on, so what counts is when rows are written; who sees them is for the mask to say.

#include "attention/attention.h"
#include "llama-kv-cells.h"

#include <cstdint>
#include <memory>
#include <vector>

// Of one layer, for each KV head strips of all streams one after the other
struct llama_kv_layer_sketch {
    int     n_head_kv = 0;
    int     d_k       = 0;
    int64_t n_strips  = 0;

    std::vector<uint8_t>  bits;
    std::vector<uint16_t> steps;

    // k: rows of all streams
    void make(const mixedkv::attention_rows & k, uint32_t strip);

    const uint8_t  * get_bits (int64_t strip) const { return bits.data() + strip*mixedkv::attention_sketch_bytes(d_k); }
    const uint16_t * get_steps(int64_t strip) const { return steps.data() + strip*mixedkv::attention_strip; }

    size_t n_bytes() const { return bits.size() + steps.size()*sizeof(steps[0]); }
};

class llama_kv_sketches {
public:
    bool empty() const { return layers.empty(); }

    void alloc(uint32_t n_cells, uint32_t n_stream, size_t n_layers);

    void add(size_t ikv, int n_head_kv, int d_k);

    // nullptr: all of its keys are read
    llama_kv_layer_sketch * get(size_t ikv) { return empty() ? nullptr : layers[ikv].get(); }

    // the row is written or rotated
    void touch(uint32_t strm, uint32_t cell);

    // so is every row of the stream
    void touch_stream(uint32_t strm);

    // so is every row that lies at another position than its key was rotated to
    void touch_moved(const std::vector<llama_kv_cells> & cells);

    // rows of a ubatch are about to be written: says which other strips are to be sketched before its queries choose
    void begin_step(const std::vector<llama_kv_cells> & cells, const std::vector<std::pair<uint32_t, uint32_t>> & written);

    // that may not have been done
    void undo_step();

    // strips of all streams that are to be sketched in the step
    const std::vector<uint32_t> & get_due() const { return due; }

    uint32_t get_n_strips() const { return n_strips; }

    // of a stream: sketches are those of the rows
    const uint8_t * get_known(uint32_t strm) const { return known.data() + strm*n_strips; }

    size_t n_bytes() const;

private:
    uint32_t n_strips = 0; // of a stream

    std::vector<std::unique_ptr<llama_kv_layer_sketch>> layers;

    std::vector<uint8_t>  known;
    std::vector<uint8_t>  is_listed;
    std::vector<uint32_t> changed; // strips whose sketches are of other rows, each once
    std::vector<uint32_t> due;
};
