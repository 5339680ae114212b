// Windows that change while the cache lives: slots are laid out anew, in a larger ring where the one that was allocated has no
// room, rows move there, and memory that is left over goes back. See docs/decisions/042.

#include "llama-kv-cache-mixed.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstring>
#include <utility>

#ifndef _WIN32
#include <sys/mman.h>
#include <unistd.h>
#endif

using mixedkv::hot_layout;

std::string llama_kv_cache_mixed::window_problem(mixedkv::hot_window value) const {
    if (!is_mixed()) {
        return "this KV cache is uniform: only a mixed cache has a window";
    }

    value.n_draft = rule.n_draft;
    if (const std::string problem = value.problem(); !problem.empty()) {
        return problem;
    }

    if (!has_ring() && is_wider(value)) {
        return "quantization_threshold " + std::to_string(value.threshold) + " and sink_tokens " + std::to_string(value.sink_tokens) +
            ": the cache was made without F16 rows, and graphs without them stay so: make it with a window";
    }

    return "";
}

bool llama_kv_cache_mixed::is_wider(mixedkv::hot_window value) const {
    value.n_draft = rule.n_draft;
    return hot_layout::least(value, get_n_seq(), get_size()) > n_slots_max;
}

void llama_kv_cache_mixed::make_room(const mixedkv::hot_window & value) {
    if (is_wider(value)) {
        auto wanted = value;
        wanted.n_draft = rule.n_draft;
        grow_rings(hot_layout::least(wanted, get_n_seq(), get_size()));
    }
}

void llama_kv_cache_mixed::grow_rings(uint32_t n_slots) {
    synchronize();

    // A graph with the rows of before is not run again: its mask has another size, where masks are padded too.
    const uint32_t n_wanted = hot_layout::rows(n_slots);
    const uint32_t n_more   = is_fused() ? n_wanted - n_ring : GGML_PAD(n_wanted - n_ring, n_pad_view);

    auto [layers, bufs] = alloc_rings(n_ring + n_more);

    for (size_t i = 0; i < layers.size(); ++i) {
        for (uint32_t strm = 0; strm < n_stream; ++strm) {
            const auto from = ring_layers[i].stream(strm);
            const auto to   = layers[i].stream(strm);
            for (size_t j = 0; j < from.size(); ++j) {
                std::vector<uint8_t> rows(layout.n_slots*from[j]->nb[1]);
                ggml_backend_tensor_get(from[j], rows.data(), 0, rows.size());
                ggml_backend_tensor_set(to[j], rows.data(), 0, rows.size());
            }
        }
    }

    ring_layers = std::move(layers);
    ring_bufs   = std::move(bufs);
    n_ring      += n_more;
    n_slots_max = n_slots;
}

void llama_kv_cache_mixed::set_window(const mixedkv::hot_window & value) {
    const uint32_t n_draft = rule.n_draft;

    rule         = value;
    rule.n_draft = n_draft;
    renew_window();
}

void llama_kv_cache_mixed::limit_window(uint32_t threshold) {
    const bool is_other = std::min(threshold, rule.threshold) != window.threshold;

    limit = threshold;
    if (is_other) {
        was_limited = true;
        renew_window();
        for (uint32_t s = 0; s < n_seq_max; ++s) {
            renew_use(s);
        }
    }
}

void llama_kv_cache_mixed::renew_window() {
    const auto before = window;

    window            = rule;
    window.threshold  = std::min(rule.threshold, limit);
    window.group_size = std::min(rule.group_size, std::max(window.threshold, 1u));

    // a window that is opened again fills from new tokens alone: no row is held for drafts
    auto kept = window;
    kept.n_draft = 0;
    for (uint32_t strm = 0; strm < n_stream; ++strm) {
        release_unwanted(strm, kept);
    }
    dirty.assign(n_stream, true);

    if (!has_ring() || (window.threshold == before.threshold && window.sink_tokens == before.sink_tokens)) {
        return;
    }

    // under a limit sequences share so much less as their windows are shorter
    const uint64_t least = hot_layout::least(window, get_n_seq(), get_size());
    const uint64_t room  = n_slots_max*window.rows()/std::max<uint64_t>(rule.rows(), 1);

    layout = hot_layout::make(window, get_n_seq(), get_size(), window.threshold < rule.threshold ? std::max(least, room) : n_slots_max);

    for (uint32_t strm = 0; strm < n_stream; ++strm) {
        move_rows(strm);
    }

    n_given_back = 0;
    for (const auto & ring : ring_layers) {
        if (layout.n_slots == n_slots_max) {
            break;
        }
        for (uint32_t strm = 0; strm < n_stream; ++strm) {
            for (const ggml_tensor * t : ring.stream(strm)) {
                give_back(t);
            }
        }
    }
}

// to the slots that the tokens would get if they came one after the other
void llama_kv_cache_mixed::move_rows(uint32_t strm) {
    const auto before = rings[strm];

    std::vector<std::pair<llama_pos, uint32_t>> cells;
    for (const int32_t cell : before.owners()) {
        if (cell >= 0) {
            cells.emplace_back(v_cells[strm].pos_get(cell), cell);
        }
    }
    std::sort(cells.begin(), cells.end());

    rings[strm] = mixedkv::hot_ring(layout.n_slots, get_size());
    for (const auto & [_, cell] : cells) {
        assign_slot(strm, cell);
    }

    synchronize();
    for (const auto & ring : ring_layers) {
        for (ggml_tensor * t : ring.stream(strm)) {
            std::vector<uint8_t> from(before.n_slots()*t->nb[1]);
            std::vector<uint8_t> to(layout.n_slots*t->nb[1]);

            ggml_backend_tensor_get(t, from.data(), 0, from.size());
            for (uint32_t slot = 0; slot < layout.n_slots; ++slot) {
                if (const int32_t cell = rings[strm].cell_of(slot); cell >= 0) {
                    memcpy(to.data() + slot*t->nb[1], from.data() + before.slot_of(cell)*t->nb[1], t->nb[1]);
                }
            }
            ggml_backend_tensor_set(t, to.data(), 0, to.size());
        }
    }
}

// The pages between the last slot and the row that nobody reads. They are zero when they are touched again.
void llama_kv_cache_mixed::give_back(const ggml_tensor * ring) {
#ifndef _WIN32
    if (ggml_backend_buffer_get_type(ring->view_src->buffer) != ggml_backend_cpu_buffer_type()) {
        return;
    }

    const uintptr_t page  = sysconf(_SC_PAGESIZE);
    const uintptr_t data  = (uintptr_t) ring->data;
    const uintptr_t begin = (data + layout.n_slots*ring->nb[1] + page - 1)/page*page;
    const uintptr_t end   = (data + get_trash_row()*ring->nb[1])/page*page;

    if (begin < end && madvise((void *) begin, end - begin, MADV_DONTNEED) == 0) {
        n_given_back += end - begin;
    }
#else
    GGML_UNUSED(ring);
#endif
}
