#include "cache/hot_ring.h"

#include <algorithm>

namespace mixedkv {

hot_ring::hot_ring(uint32_t n_slots, uint32_t n_cells) : cells(n_slots), slots(n_cells), free(n_slots) {
    clear();
}

int32_t hot_ring::assign(uint32_t cell) {
    if (free.empty()) {
        return none;
    }
    const uint32_t slot = free.back();
    free.pop_back();
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
    free.push_back(slot);
}

void hot_ring::clear() {
    std::fill(cells.begin(), cells.end(), none);
    std::fill(slots.begin(), slots.end(), none);
    free.resize(cells.size());
    // taken from the back: low slots first
    for (uint32_t i = 0; i < free.size(); ++i) {
        free[i] = uint32_t(free.size()) - 1 - i;
    }
}

} // namespace mixedkv
