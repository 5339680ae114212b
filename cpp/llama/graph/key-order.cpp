#include "graph/key-order.h"

#include <algorithm>
#include <tuple>

static constexpr int     N_PLACES     = mixedkv::attention_block::places;
static constexpr int64_t SPLIT_PLACES = 256; // a split that has these is not given another sequence
static constexpr int64_t N_SPLITS     = 16;  // where no sequence is cut
static constexpr int32_t LONG_SPLIT   = 512; // positions of a long window
static constexpr int32_t SHORT_SPLIT  = 256;
static constexpr int32_t FIRST_SPLITS = 16;  // before they grow

// 256, 512 and so on, so that each time the keys double there are 8 more
static int32_t growing_split(int32_t pos) {
    int32_t res   = 0;
    int32_t shift = 8;
    for (; pos >= FIRST_SPLITS << shift; ++shift) {
        res += FIRST_SPLITS/2;
    }
    return res + (pos >> shift);
}

llama_kv_key_order::split_rule llama_kv_key_order::cold_splits(int64_t n_seq, int64_t n_cells, int64_t n_swa) {
    if (n_swa <= 0) {
        return { growing_split, growing_split(std::max<int64_t>(n_cells, 1) - 1) + 3 };
    }
    // a query sees as many of them, and each number once
    const int32_t n = (n_swa + SHORT_SPLIT - 1)/SHORT_SPLIT + 1;

    return { [n](int32_t pos) { return pos/SHORT_SPLIT % n; }, n + std::min(N_SPLITS, n_seq - 1) };
}

llama_kv_key_order::split_rule llama_kv_key_order::hot_splits(int64_t n_seq, int64_t n_keys, bool long_windows) {
    const int64_t n = std::min(N_SPLITS + 1, n_seq);
    if (!long_windows) {
        return { [](int32_t) { return 0; }, n };
    }
    return { [](int32_t pos) { return pos/LONG_SPLIT; }, n + n_keys/LONG_SPLIT + 3*n_seq };
}

void llama_kv_key_order::begin(int64_t n_plain, std::vector<int32_t> borders, std::vector<int32_t> query_readers) {
    this->n_plain       = n_plain;
    this->borders       = std::move(borders);
    this->query_readers = std::move(query_readers);

    for (auto & cur : runs) {
        cur.clear();
    }
    blocks.clear();
    splits.assign(1, 0);
    lists.clear();
    sets.clear();
}

void llama_kv_key_order::add(int32_t reader, const run & keys) {
    runs.resize(std::max<size_t>(runs.size(), reader + 1));
    runs[reader].push_back(keys);
}

// keys from a place of a block on
void llama_kv_key_order::put(entry & to, int32_t place, const run & keys) {
    auto & block = to.block;

    const bool follows = place == to.first + block.n && (block.n == 0 ||
            (keys.column == block.key + block.n && std::find(borders.begin(), borders.end(), keys.column) == borders.end()));

    if (block.n == 0) {
        block.key = keys.column;
    }
    if (block.list < 0 && !follows) {
        block.list = lists.size()/N_PLACES;
        lists.resize(lists.size() + N_PLACES, -1);
        for (int32_t i = 0; i < block.n; ++i) {
            lists[block.list*N_PLACES + i] = block.key + i;
        }
    }
    for (int32_t i = 0; block.list >= 0 && i < keys.n; ++i) {
        lists[block.list*N_PLACES + place - to.first + i] = keys.column + i;
    }
    block.n = place + keys.n - to.first;
    to.is_shared |= keys.is_shared;
}

void llama_kv_key_order::append(int32_t reader, int32_t pos, run keys) {
    for (int32_t left = keys.n; left > 0; left -= keys.n, pos += keys.n, keys.column += keys.n) {
        const int32_t place = pos % N_PLACES;
        const int32_t index = pos/N_PLACES;
        keys.n = std::min(left, N_PLACES - place);

        entry * last = !entries.empty() && entries.back().reader == reader ? &entries.back() : nullptr;
        if (!last || last->index != index || place < last->first + last->block.n) {
            entries.push_back({ 0, reader, index, place/16*16, false, {}, {} });
            last = &entries.back();
            last->readers.set(reader);
        }
        put(*last, place, keys);
    }
}

void llama_kv_key_order::make_blocks(int32_t reader) {
    auto & own = runs[reader];
    std::sort(own.begin(), own.end(), [](const run & a, const run & b) {
        return std::tie(a.pos, a.column) < std::tie(b.pos, b.column);
    });

    int32_t last_pos = -1;
    int32_t n_same   = 0; // keys before this one at its position, as those of an image are: they follow each other
    for (const auto & cur : own) {
        n_same   = cur.pos == last_pos ? n_same + 1 : 0;
        last_pos = cur.pos + cur.n - 1;
        append(reader, cur.pos + n_same, cur);
    }
    own.clear();
}

bool llama_kv_key_order::is_same(const entry & a, const entry & b) const {
    const auto & x = a.block;
    const auto & y = b.block;

    return a.index == b.index && a.first == b.first && x.n == y.n && x.key == y.key && (x.list < 0) == (y.list < 0) &&
        (x.list < 0 || std::equal(&lists[x.list*N_PLACES], &lists[x.list*N_PLACES] + N_PLACES, &lists[y.list*N_PLACES]));
}

// entries of a split whose keys are the same become one
void llama_kv_key_order::unite(size_t first, size_t end) {
    std::stable_sort(entries.begin() + first, entries.begin() + end, [](const entry & a, const entry & b) {
        return a.index < b.index;
    });
    for (size_t i = first; i < end; ++i) {
        for (size_t j = i; j-- > first && entries[j].index == entries[i].index;) {
            if (entries[i].is_shared && entries[j].readers.any() && is_same(entries[i], entries[j])) {
                entries[j].readers |= entries[i].readers;
                entries[i].readers.reset();
                break;
            }
        }
    }
}

int32_t llama_kv_key_order::find_set(const entry & of) {
    if (!of.is_shared) {
        return 0;
    }
    const auto at = std::find(sets.begin(), sets.end(), of.readers) - sets.begin();
    if (at == (int64_t) sets.size()) {
        sets.push_back(of.readers);
    }
    return at + 1;
}

// A split may be cut between sequences, unless some of them share blocks: a query's keys stay together.
void llama_kv_key_order::close_split(size_t first, size_t end, int64_t enough, int64_t & cuts_left) {
    const auto count  = [](const entry & cur) { return cur.readers.count(); };
    const bool may_cut = std::all_of(entries.begin() + first, entries.begin() + end, [&](const entry & cur) { return count(cur) == 1; });

    if (may_cut) {
        std::stable_sort(entries.begin() + first, entries.begin() + end, [](const entry & a, const entry & b) {
            return a.reader < b.reader;
        });
    }

    int64_t n_places = 0;
    for (size_t i = first; i < end; ++i) {
        auto & cur = entries[i];
        if (count(cur) == 0) {
            continue;
        }
        if (i > first && may_cut && n_places >= enough && cuts_left > 0 && cur.reader != entries[i - 1].reader) {
            splits.push_back(blocks.size());
            n_places = 0;
            cuts_left--;
        }
        n_places += cur.block.n;
        blocks.push_back(cur.block);
        blocks.back().readers = find_set(cur);
    }
}

void llama_kv_key_order::arrange(const split_rule & by) {
    entries.clear();
    for (size_t reader = 0; reader < runs.size(); ++reader) {
        make_blocks(reader);
    }
    if (entries.empty()) {
        return;
    }

    int64_t n_places = 0;
    for (auto & cur : entries) {
        cur.split = by.find(cur.index*N_PLACES);
        n_places += cur.block.n;
    }
    std::stable_sort(entries.begin(), entries.end(), [](const entry & a, const entry & b) { return a.split < b.split; });

    int64_t n_by_position = 1;
    for (size_t i = 1; i < entries.size(); ++i) {
        n_by_position += entries[i].split != entries[i - 1].split;
    }
    int64_t cuts_left = std::max<int64_t>(0, by.most - n_by_position);

    for (size_t first = 0, end, i = 0; first < entries.size(); first = end, ++i) {
        for (end = first + 1; end < entries.size() && entries[end].split == entries[first].split; ++end) {
        }
        if (std::any_of(entries.begin() + first, entries.begin() + end, [](const entry & cur) { return cur.is_shared; })) {
            unite(first, end);
        }
        if (i > 0 && (int64_t) i < by.most) {
            splits.push_back(blocks.size());
        }
        close_split(first, end, std::max(SPLIT_PLACES, n_places/N_SPLITS), cuts_left);
    }
    splits.push_back(blocks.size());
}

void llama_kv_key_order::look(const uint16_t * columns, int64_t row) {
    const size_t n_queries = query_readers.size();

    may_read.resize(sets.size()*n_queries);
    for (size_t i = 0; i < may_read.size(); ++i) {
        may_read[i] = sets[i/n_queries].test(query_readers[i % n_queries]);
    }

    mask.resize(lists.size()*n_queries);
    for (size_t i = 0; i < n_queries; ++i) {
        for (size_t j = 0; j < lists.size(); ++j) {
            mask[i*lists.size() + j] = lists[j] < 0 ? 0xfc00 : columns[i*row + lists[j]]; // -inf
        }
    }
}

mixedkv::attention_order llama_kv_key_order::get() const {
    mixedkv::attention_order res;
    res.blocks     = blocks.data();
    res.splits     = splits.data();
    res.n_splits   = splits.size() - 1;
    res.n_plain    = n_plain;
    res.lists      = lists.data();
    res.mask       = mask.data();
    res.mask_row   = lists.size()*sizeof(uint16_t);
    res.readers    = may_read.data();
    res.reader_row = query_readers.size();
    return res;
}
