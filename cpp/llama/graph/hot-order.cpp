#include "graph/hot-order.h"

#include <algorithm>
#include <tuple>

static constexpr int     N_PLACES     = mixedkv::attention_block::places;
static constexpr int64_t SPLIT_PLACES = 256; // a split that has these is not given another sequence
static constexpr int64_t N_PIECES     = 16;  // where no sequence is cut
static constexpr int32_t LONG_PIECE   = 512; // positions of a sequence that is cut

int64_t llama_kv_hot_order::most_splits(int64_t n_seq, int64_t n_keys) const {
    return std::min(N_PIECES + 1, n_seq) + (long_windows ? n_keys/LONG_PIECE + 3*n_seq : 0);
}

void llama_kv_hot_order::make_blocks() {
    blocks.clear();
    first_keys.clear();

    int32_t last_pos = -1;
    int32_t n_same   = 0; // keys before this one at its position
    for (auto cur : keys) {
        // keys of one position, as those of an image are, follow each other
        n_same   = !blocks.empty() && cur.seq == first_keys.back().seq && cur.pos == last_pos ? n_same + 1 : 0;
        last_pos = cur.pos;
        cur.pos += n_same;

        const int place = int(uint32_t(cur.pos) % N_PLACES);

        const bool same = !blocks.empty() && first_keys.back().seq == cur.seq &&
            uint32_t(first_keys.back().pos)/N_PLACES == uint32_t(cur.pos)/N_PLACES && place >= blocks.back().first + blocks.back().n;
        if (!same) {
            first_keys.push_back(cur);
            blocks.emplace_back();
            blocks.back().first = place/16*16;
            std::fill_n(blocks.back().keys, N_PLACES, -1);
        }

        auto & block = blocks.back();
        block.keys[place - block.first] = cur.column;
        block.n = place + 1 - block.first;
    }
}

void llama_kv_hot_order::make_splits(int64_t most_splits) {
    int64_t n_places = 0;
    for (const auto & block : blocks) {
        n_places += block.n;
    }
    const int64_t enough = std::max(SPLIT_PLACES, n_places/N_PIECES);

    splits.assign(1, 0);
    n_places = 0;
    for (size_t i = 0; i < blocks.size(); ++i) {
        const auto & cur = first_keys[i];
        const auto & old = first_keys[i > 0 ? i - 1 : 0];

        const bool cut = cur.seq != old.seq ? n_places >= enough : long_windows && cur.pos/LONG_PIECE != old.pos/LONG_PIECE;
        if (cut && (int64_t) splits.size() < most_splits) {
            splits.push_back(i);
            n_places = 0;
        }
        n_places += blocks[i].n;
    }
    if (!blocks.empty()) {
        splits.push_back(blocks.size());
    }
}

void llama_kv_hot_order::arrange(int64_t most_splits) {
    std::sort(keys.begin(), keys.end(), [](const key & a, const key & b) {
        return std::tie(a.seq, a.pos, a.column) < std::tie(b.seq, b.pos, b.column);
    });
    make_blocks();
    make_splits(most_splits);
    keys.clear();
}

void llama_kv_hot_order::copy_mask(const uint16_t * columns, uint16_t * mask) const {
    for (const auto & block : blocks) {
        for (int i = 0; i < N_PLACES; ++i) {
            mask[i] = block.keys[i] < 0 ? 0xfc00 : columns[block.keys[i]]; // -inf
        }
        mask += N_PLACES;
    }
}
