#pragma once

// In which order attention reads the keys of a stream in a step: by sequence and position, wherever their rows lie.
//
// A key has its place in a block of 64 positions whether its row is in the ubatch, in a slot of the ring or in any cell. So neither
// how a prompt is cut into batches nor what else the cache holds changes a bit of what attention computes (docs/decisions/049).
// Nothing of llama.cpp is needed here.

#include "attention/attention.h"

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

class llama_kv_key_order {
public:
    static constexpr int32_t most_readers = 256;

    // Rows whose positions and columns of the mask follow each other
    struct run {
        int32_t pos;
        int32_t column;
        int32_t n;
        bool    is_shared; // another reader sees them too
    };

    // How positions are cut into KV splits, which are summed up by themselves, so that threads can share a query's keys
    struct split_rule {
        std::function<int32_t(int32_t pos)> find; // a query's sum is made of its splits in this order

        int64_t most = 1; // that there may be. Where that is too few, bits depend on more than positions
    };

    // of cold rows: 16 splits of 256 positions, then 8 times 512, 8 times 1,024 and so on; where windows of n_swa slide, 256 each
    static split_rule cold_splits(int64_t n_seq, int64_t n_cells, int64_t n_swa);

    // of n_keys F16 rows of n_seq sequences, those of the ubatch included. Windows are long where rows of one sequence shall be
    // worked on by several threads. It is a setting of a cache, not of a step.
    static split_rule hot_splits(int64_t n_seq, int64_t n_keys, bool long_windows);

    // A step: columns before all others that are read as they lie, those at which rows of another kind begin, and whose sequence
    // each query reads, counted from 0
    void begin(int64_t n_plain, std::vector<int32_t> borders, std::vector<int32_t> query_readers);

    void add(int32_t reader, const run & keys);

    // Puts what was added since the last call in order, behind what was before. Rows of cold keys and of others are put in order
    // one after the other.
    void arrange(const split_rule & by);

    // After the last of them: copies what queries see of keys whose rows do not lie side by side. mask: F16 [n_queries, row]
    void look(const uint16_t * mask, int64_t row);

    mixedkv::attention_order get() const;

private:
    struct entry {
        int32_t split;
        int32_t reader; // the first of them
        int32_t index;  // of the block among those of its sequence
        int32_t first;  // place, a multiple of 16
        bool    is_shared;

        std::bitset<most_readers> readers;
        mixedkv::attention_block  block;
    };

    int64_t              n_plain = 0;
    std::vector<int32_t> borders;
    std::vector<int32_t> query_readers;

    std::vector<std::vector<run>> runs; // by reader
    std::vector<entry>            entries;

    std::vector<mixedkv::attention_block>  blocks;
    std::vector<int64_t>                   splits;
    std::vector<int32_t>                   lists;
    std::vector<std::bitset<most_readers>> sets;
    std::vector<uint8_t>                   may_read; // [sets, queries]
    std::vector<uint16_t>                  mask;     // [queries, lists, places]

    void make_blocks(int32_t reader);
    void append(int32_t reader, int32_t pos, run keys);
    void put(entry & to, int32_t place, const run & keys);
    bool is_same(const entry & a, const entry & b) const;
    void unite(size_t first, size_t end);
    void close_split(size_t first, size_t end, int64_t enough, int64_t & cuts_left);
    int32_t find_set(const entry & of);
};
