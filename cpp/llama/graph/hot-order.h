#pragma once

// In which order attention reads the F16 rows of a stream in a step, the ring's and the ubatch's.
//
// By sequence and position: a key has its place in a block of 64 positions whether its row is still in the ubatch or
// already in a slot of the ring. So how a prompt is cut into batches changes no bit of what attention computes.
// Nothing of llama.cpp is needed here.

#include "attention/attention.h"

#include <cstddef>
#include <cstdint>
#include <vector>

class llama_kv_hot_order {
public:
    // Windows are long where rows of one sequence shall be worked on by several threads: they are cut by position. It is
    // a setting of a cache, not of a step, since results depend on where a sequence is cut.
    explicit llama_kv_hot_order(bool long_windows = false) : long_windows(long_windows) {}

    // Of any step with n_keys F16 rows of n_seq sequences, those of the ubatch included
    int64_t most_splits(int64_t n_seq, int64_t n_keys) const;

    // column: of the mask, less those of the cold rows
    void add(uint32_t seq, int32_t pos, int32_t column) { keys.push_back({ seq, pos, column }); }

    // Puts the keys that were added since the last call in order, in place of those before.
    void arrange(int64_t most_splits);

    // A query's mask of the blocks, [size()], from that of the columns
    void copy_mask(const uint16_t * columns, uint16_t * mask) const;
    size_t size() const { return blocks.size()*mixedkv::attention_block::places; }

    const std::vector<mixedkv::attention_block> & get_blocks() const { return blocks; }
    const std::vector<int64_t>                  & get_splits() const { return splits; } // ends with the number of blocks

private:
    struct key {
        uint32_t seq;
        int32_t  pos;
        int32_t  column;
    };

    bool long_windows;

    std::vector<key> keys;
    std::vector<key> first_keys; // of each block
    std::vector<mixedkv::attention_block> blocks;
    std::vector<int64_t> splits;

    void make_blocks();
    void make_splits(int64_t most_splits);
};
