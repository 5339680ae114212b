#include "hot_set/hot_ring.h"

#include <algorithm>

namespace mixedkv {

hot_ring::hot_ring(uint32_t n_slots, uint32_t n_cells) : cells(n_slots), slots(n_cells) {
    clear();
}

int32_t hot_ring::assign(uint32_t cell) {
    return free.empty() ? none : assign(cell, *free.begin());
}

int32_t hot_ring::assign(uint32_t cell, uint32_t slot) {
    if (free.erase(slot) == 0) {
        return none;
    }
    cells[slot] = int32_t(cell);
    slots[cell] = int32_t(slot);
    return int32_t(slot);
}

void hot_ring::release(uint32_t slot) {
    if (cells[slot] == none) {
        return;
    }
    slots[cells[slot]] = none;
    cells[slot]        = none;
    free.insert(slot);
}

void hot_ring::clear() {
    std::fill(cells.begin(), cells.end(), none);
    std::fill(slots.begin(), slots.end(), none);
    for (uint32_t slot = 0; slot < n_slots(); slot++) {
        free.insert(free.end(), slot);
    }
}

} // namespace mixedkv
