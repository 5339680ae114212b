#include "hooks/validity.h"

#include "cache/mixed.h"
#include "hooks/hooks.h"
#include "hooks/support.h"
#include "rows/access.h"

#include <algorithm>
#include <iterator>
#include <limits>

llama_kv_validity::stream & llama_kv_validity::of(const llama_kv_cache & kv, uint32_t strm) {
    auto & res = streams[{ &kv, strm }];
    res.rows.resize(kv.get_size());
    return res;
}

void llama_kv_validity::use_setting(uint32_t number) {
    for (auto & [key, known] : streams) {
        known.has_less = known.has_less || number != setting;
    }
    setting = number;
}

llama_kv_validity::row & llama_kv_validity::find(const llama_kv_cache & kv, uint32_t strm, uint32_t cell) {
    row &           res = of(kv, strm).rows[cell];
    const llama_pos pos = kv_access::get_cells(kv)[strm].pos_get(cell);

    if (res.pos != pos) {
        res.validity = res.pos < 0 ? MIXEDKV_UNVERIFIED : std::max(MIXEDKV_APPROXIMATE, res.validity);
        res.pos   = pos;
    }

    return res;
}

mixedkv_validity llama_kv_validity::get(const llama_kv_cache & kv, uint32_t strm, uint32_t cell) {
    const row & known = find(kv, strm, cell);
    return known.setting == setting ? known.validity : std::max(MIXEDKV_APPROXIMATE, known.validity);
}

void llama_kv_validity::set(const llama_kv_cache & kv, uint32_t strm, uint32_t cell, const row & value) {
    stream & into = of(kv, strm);

    into.rows[cell]     = value;
    into.rows[cell].pos = kv_access::get_cells(kv)[strm].pos_get(cell);
    into.has_less       = into.has_less || value.validity > MIXEDKV_COMPUTED || value.setting != setting;
}

void llama_kv_validity::mark_unverified(const llama_kv_cache & kv, uint32_t strm, uint32_t cell) {
    set(kv, strm, cell, row());
}

void llama_kv_validity::limit_cell(const llama_kv_cache & kv, uint32_t strm, uint32_t cell, mixedkv_validity validity) {
    row value   = find(kv, strm, cell);
    value.validity = std::max(value.validity, validity);
    set(kv, strm, cell, value);
}

bool llama_kv_validity::is_of(const llama_kv_cache & kv, uint32_t strm, uint32_t cell, llama_token token) {
    const llama_token known = of(kv, strm).rows[cell].token;
    return known == LLAMA_TOKEN_NULL || known == token;
}

void llama_kv_validity::limit(llama_memory_i * memory, llama_seq_id seq_id, llama_pos p0, llama_pos p1, mixedkv_validity validity) {
    for (const auto * kv : llama_kv_mixed_caches(memory)) {
        const auto & there = kv->get_cells(seq_id).seq_pos_get(seq_id);

        for (auto it = there.lower_bound({ p0, 0 }); it != there.end() && (p1 < 0 || it->first < p1); ++it) {
            limit_cell(*kv, kv->get_stream(seq_id), it->second, validity);
        }
    }
}

uint64_t llama_kv_validity::extend_past(uint64_t past, llama_token token) {
    past = (past ^ uint64_t(std::max(int64_t(token), int64_t(-1)) + 2))*0x9e3779b97f4a7c15; // all images are the same
    return past ^ (past >> 29);
}

uint64_t llama_kv_validity::past_of(const llama_kv_cache & kv, llama_seq_id seq_id, llama_pos p0) {
    const auto & there = kv.get_cells(seq_id).seq_pos_get(seq_id);
    const auto   it    = there.lower_bound({ p0, 0 });
    return it == there.begin() ? 0 : of(kv, kv.get_stream(seq_id)).rows[std::prev(it)->second].past;
}

uint64_t llama_kv_validity::get_past(llama_memory_i * memory, llama_seq_id seq_id, llama_pos p0) {
    return past_of(*llama_kv_mixed_caches(memory)[0], seq_id, p0);
}

void llama_kv_validity::record(llama_memory_i * memory, llama_seq_id seq_id, llama_pos p0, uint64_t past, const llama_token * tokens,
                               uint32_t n, mixedkv_validity validity, uint32_t setting) {
    if (get_past(memory, seq_id, p0) != past) {
        validity = std::max(validity, MIXEDKV_APPROXIMATE);
    }

    for (const auto * kv : llama_kv_mixed_caches(memory)) {
        const uint32_t strm  = kv->get_stream(seq_id);
        const auto &   there = kv->get_cells(seq_id).seq_pos_get(seq_id);

        for (auto it = there.lower_bound({ p0, 0 }); it != there.end() && it->first - p0 < llama_pos(n); ++it) {
            const llama_token token = tokens[it->first - p0];
            set(*kv, strm, it->second, { it->first, token, validity, extend_past(past_of(*kv, seq_id, it->first), token), setting });
        }
    }
}

uint32_t llama_kv_validity::get_setting(llama_memory_i * memory, llama_seq_id seq_id, llama_pos p) {
    uint32_t res = setting;
    for (const auto * kv : llama_kv_mixed_caches(memory)) {
        const auto & there = kv->get_cells(seq_id).seq_pos_get(seq_id);
        for (auto it = there.lower_bound({ p, 0 }); it != there.end() && it->first == p && res == setting; ++it) {
            res = find(*kv, kv->get_stream(seq_id), it->second).setting;
        }
    }
    return res;
}

void llama_kv_validity::copy_from_full_layers(llama_memory_i * memory, const llama_kv_cache & kv, llama_seq_id seq_id) {
    const auto &   full = *llama_kv_mixed_caches(memory)[0];
    const auto &   from = full.get_cells(seq_id).seq_pos_get(seq_id);
    const uint32_t strm = full.get_stream(seq_id);

    for (const auto & [pos, cell] : kv.get_cells(seq_id).seq_pos_get(seq_id)) {
        const auto it = from.lower_bound({ pos, 0 });
        if (it != from.end() && it->first == pos) {
            row known  = find(full, strm, it->second);
            known.past = 0;
            set(kv, kv.get_stream(seq_id), cell, known);
        }
    }
}

void llama_kv_validity::forget(llama_seq_id seq_id, bool partial) {
    for (auto & [key, known] : streams) {
        if (partial && kv_access::get_n_swa(*key.first) == 0) {
            continue;
        }

        const auto & cells = kv_access::get_cells(*key.first)[key.second];
        for (uint32_t i = 0; i < known.rows.size(); ++i) {
            if (cells.is_empty(i) || seq_id < 0 || cells.seq_has(i, seq_id)) {
                known.rows[i] = row();
            }
        }
        known.has_less = true;
    }
}

void llama_kv_validity::copy_stream(const llama_kv_cache & kv, uint32_t from, uint32_t to) {
    const auto known = of(kv, from);
    of(kv, to) = known;
}

void llama_kv_validity::note_shifts(const llama_kv_cache & kv) {
    for (uint32_t s = 0; s < kv.get_n_stream(); ++s) {
        const auto & cells = kv_access::get_cells(kv)[s];

        for (uint32_t i = cells.used_min(); i < cells.used_max_p1(); ++i) {
            if (!cells.is_empty(i) && cells.get_shift(i) != 0) {
                limit_cell(kv, s, i, MIXEDKV_APPROXIMATE);
            }
        }
    }
}

llama_pos llama_kv_validity::count_computed(
        llama_memory_i * memory, llama_seq_id seq_id, llama_pos p0, const llama_token * tokens, uint32_t n) {
    llama_pos res = std::numeric_limits<llama_pos>::max();

    for (const auto * kv : llama_kv_mixed_caches(memory)) {
        const auto &   cells = kv->get_cells(seq_id);
        const uint32_t strm  = kv->get_stream(seq_id);
        const bool     slides = kv_access::get_n_swa(*kv) > 0;

        llama_pos next = 0;
        uint64_t  past = 0;
        for (const auto & [pos, cell] : cells.seq_pos_get(seq_id)) {
            bool good = (pos <= next || slides) && get(*kv, strm, cell) == MIXEDKV_COMPUTED;

            const row & known = of(*kv, strm).rows[cell];
            past = known.pos < next ? past : extend_past(past, known.token); // rows of an image are at one position
            good = good && (slides || known.past == past); // otherwise it was computed behind other rows
            if (good && pos >= p0 && pos - p0 < llama_pos(n)) {
                good = is_of(*kv, strm, cell, tokens[pos - p0]);
            }
            if (!good) {
                res = std::min(res, slides ? pos : std::min(pos, next)); // the position may be there twice
                break;
            }
            const auto & ext = cells.ext_get(cell);
            next = kv->has_cell_ext() ? std::max({ next, pos + 1, ext.x + 1, ext.y + 1 }) : pos + 1;
        }
        res = slides ? res : std::min(res, next);
    }

    return res;
}

std::vector<mixedkv_validity> llama_kv_validity::query(
        llama_memory_i * memory, llama_seq_id seq_id, llama_pos p0, const llama_token * tokens, uint32_t n) {
    const auto caches = llama_kv_mixed_caches(memory);

    std::vector<mixedkv_validity> res(n, MIXEDKV_COMPUTED);

    for (const auto * kv : caches) {
        const uint32_t strm   = kv->get_stream(seq_id);
        const auto &   there  = kv->get_cells(seq_id).seq_pos_get(seq_id);
        const bool     slides = kv_access::get_n_swa(*kv) > 0;

        auto it = there.lower_bound({ p0, 0 });
        for (uint32_t i = 0; i < n; ++i) {
            const llama_pos pos = p0 + llama_pos(i);
            // a window keeps no others, and an image has its rows at the first of the positions that it covers
            if ((it == there.end() || it->first != pos) && !slides) {
                res[i] = kv->has_cell_ext() && i > 0 ? res[i - 1] : MIXEDKV_UNVERIFIED;
            }
            for (; it != there.end() && it->first == pos; ++it) {
                const auto validity = is_of(*kv, strm, it->second, tokens[i]) ? get(*kv, strm, it->second) : MIXEDKV_UNVERIFIED;
                res[i] = std::max(res[i], validity);
            }
        }
    }

    return res;
}

//
// steps
//

struct llama_kv_validity_seq {
    llama_seq_id     id;
    llama_pos        first = std::numeric_limits<llama_pos>::max(); // of the ubatch
    llama_pos        last  = -1;
    mixedkv_validity worst = MIXEDKV_COMPUTED;
};

static std::vector<llama_kv_validity_seq> get_sequences(const llama_ubatch & ubatch) {
    std::vector<llama_kv_validity_seq> res;
    std::vector<int32_t>  at(LLAMA_MAX_SEQ, -1);

    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        for (int32_t j = 0; j < ubatch.n_seq_id[i]; ++j) {
            const llama_seq_id s = ubatch.seq_id[i][j];
            if (at[s] < 0) {
                at[s] = int32_t(res.size());
                res.push_back({ s });
            }
            res[at[s]].first = std::min(res[at[s]].first, ubatch.pos[i]);
            res[at[s]].last  = std::max(res[at[s]].last,  ubatch.pos[i]);
        }
    }

    return res;
}

// The sequence has every position from `begin` to its end. Cells before `begin` may have been given away, as those are that
// a window has left; where none was, numbers alone tell, since this is asked at each step.
static bool has_all(const llama_kv_cells & cells, llama_seq_id seq_id, llama_pos begin) {
    const auto &    there = cells.seq_pos_get(seq_id);
    const llama_pos low   = cells.seq_pos_min(seq_id);
    if (low >= 0 && low <= begin && there.size() >= size_t(cells.seq_pos_max(seq_id) - low + 1)) {
        return true;
    }

    llama_pos next = begin;
    for (auto it = there.lower_bound({ begin, 0 }); it != there.end() && it->first <= next; ++it) {
        next = it->first + 1;
    }
    return next > cells.seq_pos_max(seq_id);
}

static llama_pos first_seen(const llama_kv_cache & kv, llama_pos n) {
    const llama_pos n_swa = llama_pos(kv_access::get_n_swa(kv));
    switch (kv_access::get_swa_type(kv)) {
        case LLAMA_SWA_TYPE_STANDARD:  return std::max(0, n - n_swa + 1);
        case LLAMA_SWA_TYPE_CHUNKED:   return n/n_swa*n_swa;
        case LLAMA_SWA_TYPE_SYMMETRIC: return std::max(0, n - n_swa/2);
        default:                       return 0;
    }
}

// a row below `n` that the window sees, and that layers which keep all rows have and this cache has not; -1: there is none
static llama_pos find_missing(const llama_kv_cache & full, const llama_kv_cache & kv, llama_seq_id seq_id, llama_pos n) {
    const llama_pos begin = first_seen(kv, n);
    const auto &    cells = kv.get_cells(seq_id);

    if (begin >= n || (has_all(cells, seq_id, begin) && cells.seq_pos_max(seq_id) >= n - 1)) {
        return -1;
    }

    const auto & wanted = full.get_cells(seq_id).seq_pos_get(seq_id);
    const auto & there  = cells.seq_pos_get(seq_id);
    for (auto it = wanted.lower_bound({ begin, 0 }); it != wanted.end() && it->first < n; ++it) {
        const auto found = there.lower_bound({ it->first, 0 });
        if (found == there.end() || found->first != it->first) {
            return it->first;
        }
    }

    return -1;
}

std::string llama_kv_validity::begin_step(llama_memory_i * memory, const llama_ubatch & ubatch) {
    const auto caches = llama_kv_mixed_caches(memory);

    refused.clear();
    lacks_hot.assign(LLAMA_MAX_SEQ, false);

    for (const auto & seq : get_sequences(ubatch)) {
        for (const auto * kv : caches) {
            const auto * mixed = dynamic_cast<const llama_kv_cache_mixed *>(kv);
            if (mixed && mixed->is_mixed() && !mixed->get_hot().get_slots().is_window_whole(seq.id, seq.first)) {
                lacks_hot[seq.id] = true;
            }

            const llama_pos missing =
                ubatch.fills || kv == caches[0] ? -1 : find_missing(*caches[0], *kv, seq.id, seq.first);
            if (missing >= 0) {
                refused = "the token at position " + std::to_string(seq.first) + " of sequence " + std::to_string(seq.id) +
                    " reads position " + std::to_string(missing) + ", which layers with a sliding window have let go of: cut the "
                    "sequence where it can go on and evaluate from there, or make the context with swa_full=True";
            }
        }
    }

    return refused;
}

// body(index in the ubatch, cell) for the cells of its tokens
template <typename F> static void for_each_cell(const llama_kv_cache & kv, const llama_ubatch & ubatch, F && body) {
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const llama_seq_id s     = ubatch.seq_id[i][0];
        const auto &       there = kv.get_cells(s).seq_pos_get(s);
        if (i > 0 && ubatch.seq_id[i - 1][0] == s && ubatch.pos[i - 1] == ubatch.pos[i]) {
            continue; // of an image, whose rows are at one position
        }
        for (auto it = there.lower_bound({ ubatch.pos[i], 0 }); it != there.end() && it->first == ubatch.pos[i]; ++it) {
            body(i, it->second);
        }
    }
}

// what a sequence lacked in one cache, besides what is wrong with the rows that are there
static void note_missing(const llama_kv_cache & kv, bool lacks_hot, llama_kv_validity_seq & seq) {
    // an image has several rows at a position
    const auto &    cells = kv.get_cells(seq.id);
    const llama_pos begin = first_seen(kv, seq.first);
    if (!kv.has_cell_ext() && !has_all(cells, seq.id, begin)) {
        seq.worst = std::max(seq.worst, MIXEDKV_INCOMPLETE);
    }
    if (lacks_hot) {
        seq.worst = std::max(seq.worst, MIXEDKV_APPROXIMATE);
    }
}

void llama_kv_validity::note_worst(const llama_kv_cache & kv, uint32_t strm, const std::vector<llama_kv_validity_seq *> & seqs) {
    const auto & cells = kv_access::get_cells(kv)[strm];
    stream &     known = of(kv, strm);

    if (!known.has_less) {
        return;
    }

    known.has_less = false;
    for (uint32_t i = cells.used_min(); i < cells.used_max_p1(); ++i) {
        const row & one = known.rows[i];
        if (cells.is_empty(i) || (one.pos == cells.pos_get(i) && one.validity == MIXEDKV_COMPUTED && one.setting == setting)) {
            continue;
        }

        known.has_less = true;

        const llama_pos pos = cells.pos_get(i);
        for (auto * seq : seqs) {
            if (cells.seq_has(i, seq->id) && pos < seq->last && !kv_access::is_masked(kv, pos, seq->first)) {
                seq->worst = std::max(seq->worst, get(kv, strm, i));
            }
        }
    }
}

void llama_kv_validity::end_step(llama_memory_i * memory, const llama_ubatch & ubatch) {
    const auto caches = llama_kv_mixed_caches(memory);

    auto seqs = get_sequences(ubatch);

    for (const auto * kv : caches) {
        for_each_cell(*kv, ubatch, [&](uint32_t i, uint32_t cell) {
            const llama_token token = ubatch.token ? ubatch.token[i] : LLAMA_TOKEN_NULL;
            const uint64_t    past  = past_of(*kv, ubatch.seq_id[i][0], ubatch.pos[i]);
            set(*kv, kv->get_stream(ubatch.seq_id[i][0]), cell, { ubatch.pos[i], token, MIXEDKV_COMPUTED, extend_past(past, token), setting });
        });

        std::map<uint32_t, std::vector<llama_kv_validity_seq *>> by_stream;
        for (auto & seq : seqs) {
            note_missing(*kv, lacks_hot[seq.id], seq);
            by_stream[kv->get_stream(seq.id)].push_back(&seq);
        }
        for (const auto & [strm, members] : by_stream) {
            note_worst(*kv, strm, members);
        }
    }

    limit_step(caches, ubatch, seqs);
}

void llama_kv_validity::limit_step(
        const std::vector<llama_kv_cache *> & caches, const llama_ubatch & ubatch, const std::vector<llama_kv_validity_seq> & seqs) {
    std::map<llama_seq_id, const llama_kv_validity_seq *> less;

    for (const auto & seq : seqs) {
        if (seq.worst > MIXEDKV_COMPUTED) {
            less[seq.id] = &seq;
        }
    }

    for (const auto * kv : caches) {
        if (less.empty()) {
            break;
        }
        for_each_cell(*kv, ubatch, [&](uint32_t i, uint32_t cell) {
            for (int32_t j = 0; j < ubatch.n_seq_id[i]; ++j) {
                const auto it = less.find(ubatch.seq_id[i][j]);
                if (it != less.end()) {
                    limit_cell(*kv, kv->get_stream(it->first), cell, it->second->worst);
                }
            }
        });
    }
}
