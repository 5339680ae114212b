#include "hot_set/hot_ring.h"

#include "check.h"

#include <random>
#include <set>

using mixedkv::hot_ring;

// slot_of and cell_of are inverse to each other, and the count is right
static void check_invariant(const hot_ring & ring, uint32_t n_cells) {
    uint32_t          n_used = 0;
    std::set<int32_t> owners;
    for (uint32_t slot = 0; slot < ring.n_slots(); slot++) {
        const int32_t cell = ring.cell_of(slot);
        if (cell == hot_ring::none) {
            continue;
        }
        n_used++;
        CHECK(owners.insert(cell).second);
        CHECK(ring.slot_of(uint32_t(cell)) == int32_t(slot));
    }
    for (uint32_t cell = 0; cell < n_cells; cell++) {
        CHECK((ring.slot_of(cell) != hot_ring::none) == (owners.count(int32_t(cell)) == 1));
    }
    CHECK(ring.n_used() == n_used);
}

static void random_use_keeps_the_invariant() {
    std::mt19937   random(1);
    const uint32_t n_cells = 50;
    hot_ring       ring(8, n_cells);
    for (int step = 0; step < 20000; step++) {
        const uint32_t cell = random() % n_cells;
        switch (random() % 3) {
        case 0:
            if (ring.slot_of(cell) == hot_ring::none) {
                const bool full = ring.n_used() == ring.n_slots();
                CHECK((ring.assign(cell) == hot_ring::none) == full);
            }
            break;
        case 1:
            ring.release(random() % ring.n_slots());
            break;
        default:
            if (random() % 500 == 0) {
                ring.clear();
            }
        }
        check_invariant(ring, n_cells);
    }
}

static void slots_are_reused() {
    hot_ring      ring(2, 10);
    const int32_t first = ring.assign(3);
    CHECK(first >= 0 && ring.assign(4) >= 0);
    CHECK(ring.assign(5) == hot_ring::none);
    ring.release(uint32_t(first));
    CHECK(ring.slot_of(3) == hot_ring::none);
    CHECK(ring.assign(5) == first);
}

static void a_copy_is_independent() {
    hot_ring ring(2, 10);
    ring.assign(1);
    hot_ring copy = ring;
    copy.release(uint32_t(copy.slot_of(1)));
    CHECK(ring.slot_of(1) >= 0 && copy.slot_of(1) == hot_ring::none);
}

static void a_ring_without_slots_gives_none() {
    hot_ring ring(0, 4);
    CHECK(ring.assign(0) == hot_ring::none);
    CHECK(ring.n_used() == 0);
}

int main() {
    random_use_keeps_the_invariant();
    slots_are_reused();
    a_copy_is_independent();
    a_ring_without_slots_gives_none();
}
