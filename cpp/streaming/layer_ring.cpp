#include "layer_ring.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace mixedkv {

static constexpr uint64_t BLOCK     = 4096;    // what O_DIRECT asks of offsets, sizes and addresses
static constexpr uint64_t GAP       = 1 << 16; // that is read along rather than stepped over
static constexpr size_t   HUGE_PAGE = 2 << 20;

static uint64_t down(uint64_t n) {
    return n / BLOCK * BLOCK;
}

static uint64_t up(uint64_t n) {
    return down(n + BLOCK - 1);
}

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

layer_ring::layer_ring(ring_settings settings) : settings(settings) {}

layer_ring::~layer_ring() {
    {
        const std::lock_guard<std::mutex> lock(mutex);
        ending = true;
        todo.clear();
    }
    wanted.notify_all();
    for (auto & thread : threads) {
        thread.join();
    }
    for (const auto & file : files) {
        if (file.mapped) {
            unmap_file(file.mapped, file.status.size);
        }
        if (file.direct != NO_FILE) {
            close_file(file.direct);
        }
        close_file(file.buffered);
    }
    if (memory) {
        free_pages(memory, n_memory);
    }
}

size_t layer_ring::add_file(int fd) {
    file res = { name_of(fd), open_again(fd, false), NO_FILE, {}, nullptr };
    if (res.buffered == NO_FILE || !get_status(res.buffered, res.status)) {
        throw read_error(res.name + " cannot be opened again: " + strerror(errno));
    }
    if (settings.mode == ring_mode::direct) {
        res.direct = open_again(fd, true);
    } else {
        res.mapped = static_cast<uint8_t *>(map_file(res.buffered, res.status.size));
        if (!res.mapped) {
            const int problem = errno;
            close_file(res.buffered);
            throw read_error(res.name + " cannot be mapped: " + strerror(problem));
        }
    }
    files.push_back(res);
    return files.size() - 1;
}

void layer_ring::add(size_t layer, size_t file, uint64_t offset, uint64_t size) {
    if (layers.size() <= layer) {
        layers.resize(layer + 1);
    }
    layers[layer].runs.push_back({ file, offset, offset + size, 0 });
}

void layer_ring::start() {
    size_t largest = 0;
    for (auto & layer : layers) {
        auto & runs = layer.runs;
        std::sort(runs.begin(), runs.end(), [](const run & a, const run & b) {
            return a.file != b.file ? a.file < b.file : a.offset < b.offset;
        });
        std::vector<run> joined;
        for (const auto & run : runs) {
            if (!joined.empty() && joined.back().file == run.file && run.offset <= joined.back().end + GAP) {
                joined.back().end = std::max(joined.back().end, run.end);
            } else {
                joined.push_back(run);
            }
        }
        layer.size = 0;
        for (auto & run : joined) {
            run.offset = down(run.offset);
            run.at     = layer.size;
            layer.size += up(run.end) - run.offset;
            counts.bytes_streamed += run.end - run.offset;
        }
        runs    = joined;
        largest = std::max(largest, layer.size);
    }

    slots.resize(std::min(settings.n_slots, layers.size()));
    if (settings.mode == ring_mode::direct) {
        const size_t size = (largest + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        n_memory          = slots.size() * size + HUGE_PAGE; // to align
        memory            = static_cast<uint8_t *>(allocate_pages(n_memory, false));
        if (!memory) {
            throw std::bad_alloc();
        }
        use_large_pages(memory, n_memory);
        auto * const first =
            reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(memory) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
        for (size_t i = 0; i < slots.size(); ++i) {
            slots[i].data = first + i * size;
        }
        counts.bytes_ring = slots.size() * largest;
    }
    for (size_t i = 0; i < settings.n_threads; ++i) {
        threads.emplace_back([this] { work(); });
    }
    const std::lock_guard<std::mutex> lock(mutex);
    plan();
}

size_t layer_ring::where(size_t layer, size_t file, uint64_t offset) const {
    for (const auto & run : layers[layer].runs) {
        if (run.file == file && run.offset <= offset && offset < run.end) {
            return settings.mode == ring_mode::direct ? run.at + (offset - run.offset)
                                                      : reinterpret_cast<size_t>(files[file].mapped) + offset;
        }
    }
    throw std::logic_error("these bytes belong to no layer");
}

layer_ring::slot * layer_ring::find(size_t layer) {
    const auto it = std::find_if(slots.begin(), slots.end(),
                                 [&](const slot & s) { return s.is != state::empty && s.layer == layer; });
    return it == slots.end() ? nullptr : &*it;
}

// Slots that the pass has left get the layers that it needs next. The mutex is held.
void layer_ring::plan() {
    while (failed.empty()) {
        if (slot * const s = find(next)) {
            if (s->is != state::left) {
                break;
            }
            s->is = state::there; // all layers fit
        } else {
            const auto free = std::find_if(slots.begin(), slots.end(),
                                           [](const slot & s) { return s.is == state::empty || s.is == state::left; });
            if (free == slots.end()) {
                break;
            }
            leave(*free);
            free->layer  = next;
            free->is     = state::coming;
            free->n_left = 0;
            for (const auto & run : layers[next].runs) {
                for (uint64_t at = run.offset; at < run.end; at += settings.chunk) {
                    todo.push_back({ size_t(free - slots.begin()), run.file, at, std::min(run.end, at + settings.chunk),
                                     run.at + (at - run.offset) });
                    ++free->n_left;
                }
            }
            wanted.notify_all();
        }
        next = (next + 1) % layers.size();
    }
}

// Mapped pages of a layer that another replaces are given back, before those that stay are
void layer_ring::leave(const slot & which) {
    if (settings.mode == ring_mode::prefetch && which.is == state::left) {
        for (const auto & run : layers[which.layer].runs) {
            forget(files[run.file].mapped + run.offset, up(run.end) - run.offset);
            forget(files[run.file].buffered, run.offset, up(run.end) - run.offset);
        }
    }
}

// The pass goes on elsewhere than was expected, or after a failure
void layer_ring::refill(std::unique_lock<std::mutex> & lock, size_t layer) {
    todo.clear();
    arrived.wait(lock,
                 [&] { return std::all_of(slots.begin(), slots.end(), [](const slot & s) { return s.n_busy == 0; }); });
    failed.clear(); // it is tried again
    for (auto & s : slots) {
        if (s.is == state::coming) {
            s.is = state::empty;
        } else if (s.is == state::there) {
            s.is = state::left;
        }
    }
    next = layer;
    plan();
}

const uint8_t * layer_ring::hold(size_t layer, const std::function<bool()> & stop) {
    std::unique_lock<std::mutex> lock(mutex);

    ++counts.n_holds;
    slot * s = find(layer);
    if (!s || s->is == state::left || !failed.empty()) {
        refill(lock, layer);
        s = find(layer);
        if (!s) {
            throw std::logic_error("a pass holds more layers than the ring has room for");
        }
    }
    if (s->is == state::coming) {
        ++counts.n_stalls;
        const double began = now();
        bool         ends  = false;
        while (s->is == state::coming && failed.empty() && !ends) {
            if (arrived.wait_for(lock, std::chrono::milliseconds(100)) == std::cv_status::timeout) {
                lock.unlock();
                ends = stop && stop();
                lock.lock();
            }
        }
        counts.seconds_waiting += now() - began;
        if (!failed.empty()) {
            throw read_error(failed);
        }
        if (ends) { // even where the layer has come meanwhile: who said stop has an exception that is to be raised
            throw interrupted_error();
        }
    }
    if (settings.mode == ring_mode::prefetch) { // pages that were there are gone with the file's end
        for (const auto & run : layers[layer].runs) {
            check(files[run.file]);
        }
    }
    s->is = state::held;
    return s->data;
}

void layer_ring::release(size_t layer) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (slot * const s = find(layer)) {
        s->is = state::left;
        plan();
    }
}

void layer_ring::work() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        wanted.wait(lock, [&] { return ending || !todo.empty(); });
        if (ending) {
            return;
        }
        const chunk what = todo.front();
        todo.pop_front();
        slot & to = slots[what.slot];
        ++to.n_busy;
        if (n_reading++ == 0) {
            reading_since = now();
        }
        lock.unlock();

        std::string problem;
        try {
            settings.mode == ring_mode::direct ? bring(what) : bring_mapped(what);
            check(files[what.file]);
        } catch (const std::exception & err) {
            problem = err.what();
        }

        lock.lock();
        if (--n_reading == 0) {
            counts.seconds_reading += now() - reading_since;
        }
        --to.n_busy;
        if (!problem.empty()) {
            failed = problem;
            todo.clear();
        } else {
            counts.bytes_read += what.end - what.offset;
            if (--to.n_left == 0) {
                to.is = state::there;
                ++counts.n_layers;
            }
        }
        arrived.notify_all();
    }
}

void layer_ring::check(const file & of) const {
    file_status status;
    if (!get_status(of.buffered, status)) {
        throw read_error(of.name + " cannot be read: " + strerror(errno));
    }
    if (status.size < of.status.size) {
        throw read_error(of.name + " has become shorter since it was loaded, " + std::to_string(status.size) + " of " +
                         std::to_string(of.status.size) + " bytes: put it back and load the model again");
    }
    if (status.changed != of.status.changed) {
        throw read_error(of.name + " has been written to since it was loaded: load the model again");
    }
}

void layer_ring::bring(const chunk & what) {
    // whole blocks: the slot has room for them, the file's last one may be shorter
    pread_all(files[what.file], what.offset, up(what.end), what.end, slots[what.slot].data + what.at);
}

void layer_ring::bring_mapped(const chunk & what) {
    const file & from = files[what.file];

    check(from);
    if (const int problem = fetch(from.mapped + what.offset, up(what.end) - what.offset)) {
        throw read_error(from.name + " cannot be read at byte " + std::to_string(what.offset) + ": " +
                         strerror(problem));
    }
}

// As far as `end`, or the file's end if that is not before `least`
void layer_ring::pread_all(file & from, uint64_t offset, uint64_t end, uint64_t least, uint8_t * to) {
    uint64_t at = offset;
    while (at < least) {
        const bool    direct = from.direct != NO_FILE && !buffered && at % BLOCK == 0;
        const int64_t n      = read_at(direct ? from.direct : from.buffered, to + (at - offset), end - at, at);
        if (n < 0 && errno == EINVAL && direct) {
            buffered = true;
            continue;
        }
        if (n < 0) {
            throw read_error(from.name + " cannot be read at byte " + std::to_string(at) + ": " + strerror(errno));
        }
        if (n == 0) {
            check(from);
            throw read_error(from.name + " ends at byte " + std::to_string(at));
        }
        at += n;
    }
    if (from.direct == NO_FILE || buffered) {
        forget(from.buffered, offset, end - offset); // it would push out what stays
    }
}

void layer_ring::read(size_t file, uint64_t offset, uint64_t size, void * to) {
    auto &   from = files[file];
    uint64_t done = 0; // not aligned: through the page cache
    while (done < size) {
        const int64_t n = read_at(from.buffered, static_cast<uint8_t *>(to) + done, size - done, offset + done);
        if (n <= 0) {
            throw read_error(from.name + " cannot be read at byte " + std::to_string(offset + done) + ": " +
                             (n < 0 ? strerror(errno) : "it ends there"));
        }
        done += n;
    }
    forget(from.buffered, offset, size);
}

ring_stats layer_ring::stats() {
    const std::lock_guard<std::mutex> lock(mutex);

    ring_stats res = counts;
    if (n_reading > 0) {
        res.seconds_reading += now() - reading_since;
    }
    res.o_direct = !buffered && !files.empty() &&
                   std::all_of(files.begin(), files.end(), [](const file & f) { return f.direct != NO_FILE; });
    return res;
}

int layer_ring::lock() {
    return memory ? lock_pages(slots[0].data, memory + n_memory - slots[0].data - HUGE_PAGE) : 0;
}

} // namespace mixedkv
