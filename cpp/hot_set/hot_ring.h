// Which cell of one stream holds which slot of the F16 ring. Bookkeeping only: no rows, no tensors.

#pragma once

#include <cstdint>
#include <set>
#include <vector>

namespace mixedkv {

// Invariant: slot_of and cell_of are inverse to each other where defined, so a slot belongs to one cell at most.
class hot_ring {
  public:
    static constexpr int32_t none = -1;

    hot_ring(uint32_t n_slots, uint32_t n_cells);

    // Gives the cell the lowest free slot, so that where rows lie follows from which slots are in use and not from how
    // that came about; `none` when there is none. The cell must not hold a slot yet.
    int32_t assign(uint32_t cell);
    // The same with this slot, if it is free.
    int32_t assign(uint32_t cell, uint32_t slot);
    void    release(uint32_t slot);
    void    clear();

    int32_t slot_of(uint32_t cell) const { return slots[cell]; }
    int32_t cell_of(uint32_t slot) const { return cells[slot]; }

    uint32_t n_slots() const { return uint32_t(cells.size()); }
    uint32_t n_used() const { return n_slots() - uint32_t(free.size()); }

    // slot -> cell or `none`
    const std::vector<int32_t> & owners() const { return cells; }

  private:
    std::vector<int32_t> cells; // by slot
    std::vector<int32_t> slots; // by cell
    std::set<uint32_t>   free;
};

} // namespace mixedkv
