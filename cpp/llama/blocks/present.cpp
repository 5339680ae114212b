#include "blocks/present.h"

#include "blocks/view.h"
#include "cache/mixed.h"
#include "hooks/support.h"
#include "rows/access.h"

#include "llama-memory-recurrent.h"

#include <algorithm>

// the first position of [begin, end) that the sequence does not have once, or `end`; an image covers its columns and rows
static llama_pos first_gap(const llama_kv_cache & kv, llama_seq_id seq_id, llama_pos begin, llama_pos end) {
    const auto & cells = kv.get_cells(seq_id);
    const auto & rows  = cells.seq_pos_get(seq_id);
    const bool   is_2d = kv.has_cell_ext();

    llama_pos next = is_2d ? 0 : begin;

    for (auto it = rows.lower_bound({ next, 0 }); it != rows.end() && it->first < end && next < end; ++it) {
        if (it->first > std::max(next, begin) || (!is_2d && it->first < next)) {
            break; // a gap, or a position that is there twice
        }
        const auto & ext = cells.ext_get(it->second);
        next = is_2d ? std::max({ next, it->first + 1, ext.x + 1, ext.y + 1 }) : it->first + 1;
    }

    return std::min(std::max(next, begin), end);
}

// the first position that the token at n reads in this cache
static llama_pos first_read(const llama_kv_cache & kv, llama_pos n) {
    llama_pos first = n;
    while (first > 0 && kv_access::get_n_swa(kv) > 0 && !kv_access::is_masked(kv, first - 1, n)) {
        --first;
    }
    return kv_access::get_n_swa(kv) > 0 ? first : 0;
}

// The longest cut up to n in one cache. No cut behind a missing row goes on that reads it, and later cuts read from later on.
static llama_pos find_cut(const llama_kv_cache & kv, llama_seq_id seq_id, llama_pos n) {
    while (n > 0) {
        const llama_pos gap = first_gap(kv, seq_id, first_read(kv, n), n);
        if (gap == n) {
            break;
        }
        n = gap;
    }

    return n;
}

// the same of recurrent layers: where their state stands, or a snapshot that llama_memory_recurrent::seq_rm goes back to
static llama_pos find_cut(const llama_memory_recurrent & states, llama_seq_id seq_id, llama_pos n) {
    const int32_t tail = states.cells[seq_id].tail;
    if (tail < 0) {
        return 0;
    }

    const auto &    cell = states.cells[tail];
    const llama_pos back = cell.pos + 1 - n;
    if (back <= 0) {
        return cell.pos + 1;
    }

    const bool has_snapshot = states.rs_idx[seq_id] == 0 && back <= llama_pos(states.n_rs_seq) && back < states.rs_len.at(seq_id) &&
        cell.seq_id.size() == 1;

    return has_snapshot ? n : 0;
}

mixedkv_cut llama_kv_find_cut(llama_context & ctx, llama_seq_id seq_id, llama_pos n) {
    auto *       memory = ctx.get_memory();
    const auto   caches = llama_kv_mixed_caches(memory);
    const auto * states = llama_kv_mixed_states(memory);

    mixedkv_cut res = { n, n, n, n, true };

    if (caches.empty() && !states) { // of a kind that cannot be looked into
        const llama_pos end = memory->seq_pos_min(seq_id) == 0 ? memory->seq_pos_max(seq_id) + 1 : 0;
        res.n = res.n_full = std::min(n, end);
        return res;
    }

    for (const auto * kv : caches) {
        llama_pos & of_kind = kv_access::get_n_swa(*kv) > 0 ? res.n_window : res.n_full;
        of_kind = std::min(of_kind, find_cut(*kv, seq_id, n));

        const auto * mixed = dynamic_cast<const llama_kv_cache_mixed *>(kv);
        res.has_hot = res.has_hot && (!mixed || !mixed->is_mixed() || mixed->get_hot().get_slots().is_window_whole(seq_id, n));
    }
    res.n_state = states ? find_cut(*states, seq_id, n) : n;

    // one that all of them allow
    for (llama_pos before = -1; before != res.n;) {
        before = res.n;
        for (const auto * kv : caches) {
            res.n = find_cut(*kv, seq_id, res.n);
        }
        res.n = states ? find_cut(*states, seq_id, res.n) : res.n;
    }

    return res;
}
