// Windows that change while the cache lives: slots are laid out anew, in a larger ring where the one that was allocated has no
// room, rows move there, and memory that is left over goes back. See docs/decisions/042.

#include "cache/hot-rows.h"

#include "streaming/file_access.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstring>
#include <utility>

using mixedkv::hot_layout;

bool llama_kv_hot_rows::is_wider(mixedkv::hot_window value) const {
    value.n_draft = slots.get_window().n_draft;
    return hot_layout::least(value, slots.get_n_seq(), cold.get_size()) > n_slots_max;
}

void llama_kv_hot_rows::make_room(mixedkv::hot_window value, uint32_t n_pad) {
    if (is_wider(value)) {
        value.n_draft = slots.get_window().n_draft;
        grow(hot_layout::least(value, slots.get_n_seq(), cold.get_size()), n_pad);
    }
}

void llama_kv_hot_rows::grow(uint32_t n_slots, uint32_t n_pad) {
    synchronize();

    const uint32_t n_more = GGML_PAD(hot_layout::rows(n_slots) - n_rows, n_pad);

    auto [grown, grown_bufs] = alloc(n_rows + n_more);

    for (size_t i = 0; i < grown.size(); ++i) {
        for (uint32_t strm = 0; strm < n_stream; ++strm) {
            const auto from = layers[i].stream(strm);
            const auto to   = grown[i].stream(strm);
            for (size_t j = 0; j < from.size(); ++j) {
                std::vector<uint8_t> rows(slots.get_layout().n_slots*from[j]->nb[1]);
                ggml_backend_tensor_get(from[j], rows.data(), 0, rows.size());
                ggml_backend_tensor_set(to[j], rows.data(), 0, rows.size());
            }
        }
    }

    layers      = std::move(grown);
    bufs        = std::move(grown_bufs);
    n_rows      += n_more;
    n_slots_max = n_slots;
}

void llama_kv_hot_rows::set_window(const mixedkv::hot_window & value) {
    const auto before = slots.get_window();

    slots.set_window(value);
    lay_out(before);
}

void llama_kv_hot_rows::lay_out(const mixedkv::hot_window & before) {
    const auto & window = slots.get_window();

    if (!has_rows() || (window.threshold == before.threshold && window.sink_tokens == before.sink_tokens)) {
        return;
    }

    std::vector<mixedkv::hot_ring> rings;
    for (uint32_t strm = 0; strm < n_stream; ++strm) {
        rings.push_back(slots.get_ring(strm));
    }

    slots.lay_out(hot_layout::make(window, slots.get_n_seq(), cold.get_size(), n_slots_max));

    for (uint32_t strm = 0; strm < n_stream; ++strm) {
        move_rows(strm, rings[strm]);
    }

    n_given_back = 0;
    for (const auto & ring : layers) {
        if (slots.get_layout().n_slots == n_slots_max) {
            break;
        }
        for (uint32_t strm = 0; strm < n_stream; ++strm) {
            for (const ggml_tensor * t : ring.stream(strm)) {
                give_back(t);
            }
        }
    }
}

// Moves the F16 row of each cell from the slot that it had in `before` to the one that it has now.
void llama_kv_hot_rows::move_rows(uint32_t strm, const mixedkv::hot_ring & before) {
    const auto & after = slots.get_ring(strm);

    synchronize();
    for (const auto & ring : layers) {
        for (ggml_tensor * t : ring.stream(strm)) {
            std::vector<uint8_t> from(before.n_slots()*t->nb[1]);
            std::vector<uint8_t> to(after.n_slots()*t->nb[1]);

            ggml_backend_tensor_get(t, from.data(), 0, from.size());
            for (uint32_t slot = 0; slot < after.n_slots(); ++slot) {
                if (const int32_t cell = after.cell_of(slot); cell >= 0) {
                    memcpy(to.data() + slot*t->nb[1], from.data() + before.slot_of(cell)*t->nb[1], t->nb[1]);
                }
            }
            ggml_backend_tensor_set(t, to.data(), 0, to.size());
        }
    }
}

// The pages between the last slot and the row that nobody reads. They are zero when they are touched again.
void llama_kv_hot_rows::give_back(const ggml_tensor * ring) {
    if (ggml_backend_buffer_get_type(ring->view_src->buffer) != ggml_backend_cpu_buffer_type()) {
        return;
    }

    auto * const begin = static_cast<uint8_t *>(ring->data) + slots.get_layout().n_slots*ring->nb[1];
    auto * const end   = static_cast<uint8_t *>(ring->data) + get_trash_row()*ring->nb[1];

    if (begin < end) {
        n_given_back += mixedkv::give_back_pages(begin, end - begin);
    }
}
