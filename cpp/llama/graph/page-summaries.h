#pragma once

// What keys are like, page by page, of layers whose attention may leave pages out: see docs/decisions/040. A page's rows are all
// that its summary depends on, so what counts is when rows are written; who sees them is for the mask to say.

#include "attention/attention.h"
#include "llama-kv-cells.h"

#include <cstdint>
#include <memory>
#include <vector>

// Of one layer, pages of all streams one after the other
struct llama_kv_layer_pages {
    int n_head_kv = 0;
    int d_k       = 0;

    std::vector<uint16_t> means;   // F16 [n_pages*n_stream, n_head_kv, d_k]
    std::vector<float>    spreads; // [n_pages*n_stream, n_head_kv]

    // what K lacks, with mean cosines and sines
    std::vector<mixedkv::attention_pair> pairs;
    std::vector<std::vector<float>>      turns; // of each pair cosines and sines

    // k: rows of all streams; source: what they lack, nullptr: nothing
    void sum_up(const mixedkv::attention_rows & k, const std::vector<mixedkv::attention_pair> * source, uint32_t page);

    size_t n_bytes() const;
};

class llama_kv_pages {
public:
    bool empty() const { return layers.empty(); }

    void alloc(uint32_t n_cells, uint32_t n_stream, size_t n_layers);

    // pairs: what K of the layer lacks, nullptr: nothing
    void add(size_t ikv, int n_head_kv, int d_k, const std::vector<mixedkv::attention_pair> * pairs);

    // nullptr: all of its keys are read
    llama_kv_layer_pages * get(size_t ikv) { return empty() ? nullptr : layers[ikv].get(); }

    // the row is written or turned
    void touch(uint32_t strm, uint32_t cell);

    // so is every row of the stream
    void touch_stream(uint32_t strm);

    // so is every row that lies at another position than its key was turned to
    void touch_moved(const std::vector<llama_kv_cells> & cells);

    // rows of a ubatch are about to be written: says which other pages are to be summed up before its queries choose
    void begin_step(const std::vector<llama_kv_cells> & cells, const std::vector<std::pair<uint32_t, uint32_t>> & written);

    // that may not have been done
    void undo_step();

    // pages of all streams that are to be summed up in the step
    const std::vector<uint32_t> & get_due() const { return due; }

    uint32_t get_n_pages() const { return n_pages; }

    // of a stream: summaries are those of the rows
    const uint8_t * get_known(uint32_t strm) const { return known.data() + strm*n_pages; }

    size_t n_bytes() const;

private:
    uint32_t n_pages = 0; // of a stream

    std::vector<std::unique_ptr<llama_kv_layer_pages>> layers;

    std::vector<uint8_t>  known;
    std::vector<uint8_t>  is_listed;
    std::vector<uint32_t> changed; // pages whose summaries are of other rows, each once
    std::vector<uint32_t> due;
};
