#ifdef __APPLE__ // which otherwise hides contexts, and with this alone what is not POSIX's
#define _XOPEN_SOURCE 700
#define _DARWIN_C_SOURCE
#pragma clang diagnostic ignored "-Wdeprecated-declarations" // contexts are, and have no successor
#endif

#include "emulated_device.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <ucontext.h>
#include <vector>

namespace mixedkv {
namespace cuda {
namespace {

constexpr int    lanes       = 32;
constexpr size_t stack_bytes = 256 * 1024;

struct pending_copy {
    void *       to;
    const void * from;
    int          bytes;
};

struct fibre {
    ucontext_t                             context;
    std::unique_ptr<char[]>                stack;
    bool                                   done = false;
    std::vector<std::vector<pending_copy>> groups; // of copies; the last is not committed
};

// Who has come to a barrier. What lanes give lies in two places in turn: a lane may still read the one before.
struct meeting {
    int      arrived    = 0;
    uint64_t n_meetings = 0;
    uint32_t words[2][lanes][8];
};

struct emulated_block {
    std::vector<fibre>   fibres;
    std::vector<meeting> warps;
    meeting              all;
    bool                 any[4] = {}; // what threads give to any_thread, by the number of the meeting
    std::vector<char>    shared;
    ucontext_t           scheduler;
    int                  current = 0;
    bool                 moved   = false; // somebody came or went since the last round
    int                  x = 0, y = 0, z = 0;

    const std::function<void()> * kernel = nullptr;
};

emulated_block * block = nullptr;

fibre & self() {
    return block->fibres[block->current];
}

void meet(meeting & m, int n) {
    const uint64_t no = m.n_meetings;
    block->moved      = true;
    if (++m.arrived == n) {
        m.arrived = 0;
        m.n_meetings++;
        return;
    }
    while (m.n_meetings == no) {
        swapcontext(&self().context, &block->scheduler);
    }
}

void run_fibre() {
    (*block->kernel)();
    self().done  = true;
    block->moved = true;
    while (true) {
        swapcontext(&self().context, &block->scheduler);
    }
}

void run_block(int threads) {
    for (int i = 0; i < threads; i++) {
        fibre & f = block->fibres[i];
        f.stack.reset(new char[stack_bytes]);
        f.groups.assign(1, {});
        getcontext(&f.context);
        f.context.uc_stack.ss_sp   = f.stack.get();
        f.context.uc_stack.ss_size = stack_bytes;
        f.context.uc_link          = nullptr;
        makecontext(&f.context, run_fibre, 0);
    }
    int left = threads;
    while (left > 0) {
        block->moved = false;
        left         = 0;
        for (int i = 0; i < threads; i++) {
            if (!block->fibres[i].done) {
                block->current = i;
                swapcontext(&block->scheduler, &block->fibres[i].context);
                left += !block->fibres[i].done;
            }
        }
        if (left > 0 && !block->moved) {
            std::printf("FAIL a kernel waits for threads that never come\n");
            std::abort();
        }
    }
}

} // namespace

void launch(grid_size grid, int threads, size_t shared_bytes, const std::function<void()> & kernel) {
    for (int z = 0; z < grid.z; z++) {
        for (int y = 0; y < grid.y; y++) {
            for (int x = 0; x < grid.x; x++) {
                emulated_block b;
                b.fibres.resize(threads);
                b.warps.resize(threads / lanes);
                b.shared.assign(shared_bytes, char(0x7f)); // NaN for whoever reads what nobody wrote
                b.x = x, b.y = y, b.z = z;
                b.kernel = &kernel;
                block    = &b;
                run_block(threads);
                block = nullptr;
            }
        }
    }
}

int thread() {
    return block->current;
}

int block_x() {
    return block->x;
}

int block_y() {
    return block->y;
}

int block_z() {
    return block->z;
}

char * shared_memory() {
    return block->shared.data();
}

void sync_block() {
    const uint64_t no = block->all.n_meetings;
    meet(block->all, int(block->fibres.size()));
    block->any[(no + 2) % 4] = false;
}

bool any_thread(bool x) {
    bool & any = block->any[block->all.n_meetings % 4];
    any |= x;
    sync_block();
    return any;
}

void sync_warp() {
    meet(block->warps[block->current / lanes], lanes);
}

const uint32_t (*exchange(const uint32_t * words, int n))[8] {
    meeting & m     = block->warps[block->current / lanes];
    auto &    place = m.words[m.n_meetings % 2];
    std::memcpy(place[block->current % lanes], words, 4 * n);
    meet(m, lanes);
    return place;
}

void copy_async_bytes(void * to, const void * from, int bytes) {
    if (reinterpret_cast<uintptr_t>(to) % bytes || reinterpret_cast<uintptr_t>(from) % bytes) {
        std::printf("FAIL a copy of %d bytes is not aligned\n", bytes);
        std::abort();
    }
    self().groups.back().push_back({ to, from, bytes });
}

void commit_copies() {
    self().groups.emplace_back();
}

void wait_for_copies(int n) {
    auto & groups = self().groups; // the open one stays
    while (int(groups.size()) - 1 > n) {
        for (const pending_copy & c : groups.front()) {
            std::memcpy(c.to, c.from, c.bytes);
        }
        groups.erase(groups.begin());
    }
}

} // namespace cuda
} // namespace mixedkv
