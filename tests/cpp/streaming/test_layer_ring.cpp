// A ring against the bytes of a file: every layer, in any order, in both modes; and what is said when that cannot be.

#include "streaming/layer_ring.h"

#include "check.h"

#include <atomic>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <string>

#include <fcntl.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

using namespace mixedkv;
namespace fs = std::filesystem;

#ifdef MIXEDKV_PLAIN_POSIX
static constexpr bool FINDS_NAMES = false;
#else
static constexpr bool FINDS_NAMES = true;
#endif

static constexpr size_t N_LAYERS = 5;
static constexpr size_t SIZE     = 300'000; // of a matrix, of which a layer has two with a gap between

struct model {
    std::string          path;
    int                  fd;
    std::vector<uint8_t> bytes;

    explicit model(const fs::path & folder) : path((folder / "layers.XXXXXX").make_preferred().string()) {
#ifdef _WIN32 // whose mkstemp lets nobody else open the file
        fd = open(mktemp(path.data()), O_RDWR | O_CREAT | O_EXCL | O_BINARY, 0600);
#else
        fd = mkstemp(path.data());
#endif
        CHECK(fd >= 0);
        std::mt19937 random(7);
        bytes.resize(offset(N_LAYERS, 0) + 77); // no whole block at the end
        for (auto & byte : bytes) {
            byte = random();
        }
        CHECK(write(fd, bytes.data(), bytes.size()) == ssize_t(bytes.size()));
#ifndef _WIN32
        CHECK(fsync(fd) == 0);
#endif
    }

    ~model() {
        close(fd);
        unlink(path.c_str());
    }

    static size_t offset(size_t layer, size_t matrix) { return 1032 + (2 * layer + matrix) * (SIZE + 100'000); }
};

// as the system names it
static fs::path temporary() {
    return fs::canonical(fs::temp_directory_path());
}

static void fill(layer_ring & ring, int fd) {
    const size_t file = ring.add_file(fd);
    for (size_t layer = 0; layer < N_LAYERS; ++layer) {
        ring.add(layer, file, model::offset(layer, 1), SIZE);
        ring.add(layer, file, model::offset(layer, 0), SIZE);
    }
    ring.start();
}

static bool holds(layer_ring & ring, const model & of, size_t layer) {
    const auto base = reinterpret_cast<uintptr_t>(ring.hold(layer, nullptr));
    bool       res  = true;
    for (size_t i = 0; i < 2; ++i) {
        const size_t at = model::offset(layer, i);
        res = res && memcmp(reinterpret_cast<void *>(base + ring.where(layer, 0, at)), &of.bytes[at], SIZE) == 0;
    }
    ring.release(layer);
    return res;
}

static std::string problem(layer_ring & ring) {
    try {
        for (size_t i = 0; i < 2 * N_LAYERS; ++i) {
            ring.hold(i % N_LAYERS, nullptr);
            ring.release(i % N_LAYERS);
        }
    } catch (const read_error & err) {
        return err.what();
    }
    return "";
}

static ring_settings settings(ring_mode mode, size_t n_slots = 3) {
    ring_settings res;
    res.mode    = mode;
    res.n_slots = n_slots;
    res.chunk   = 1 << 16;
    return res;
}

static void reads_what_is_there(const model & file, ring_mode mode) {
    for (size_t n_slots : { 2, 3, 9 }) {
        layer_ring ring(settings(mode, n_slots));
        fill(ring, file.fd);
        for (size_t pass = 0; pass < 3; ++pass) {
            for (size_t layer = 0; layer < N_LAYERS; ++layer) {
                CHECK(holds(ring, file, layer));
            }
        }
        std::mt19937 random(3);
        for (size_t i = 0; i < 40; ++i) {
            CHECK(holds(ring, file, random() % N_LAYERS));
        }
        const auto stats = ring.stats();
        const auto whole = N_LAYERS * 2 * SIZE; // and what comes before each in its first block
        CHECK(stats.bytes_streamed >= whole && stats.bytes_streamed < whole + N_LAYERS * 2 * 4096);
        CHECK(stats.n_holds == 3 * N_LAYERS + 40);
        CHECK(n_slots == 9 ? stats.n_layers == N_LAYERS : stats.n_layers > 3 * N_LAYERS);
    }
}

static void holds_two_at_a_time(const model & file) {
    layer_ring ring(settings(ring_mode::direct, 2));
    fill(ring, file.fd);
    ring.hold(0, nullptr);
    ring.hold(1, nullptr);
    bool refused = false;
    try {
        ring.hold(2, nullptr);
    } catch (const std::logic_error &) {
        refused = true;
    }
    CHECK(refused);
    ring.release(0);
    CHECK(holds(ring, file, 2));
}

static void says_that_it_was_written_to(ring_mode mode) {
    model      file(temporary());
    layer_ring changed(settings(mode));
    fill(changed, file.fd);
    std::fstream(file.path, std::ios::in | std::ios::out | std::ios::binary).seekp(5000) << "x";
    fs::last_write_time(file.path, fs::file_time_type::clock::now() - std::chrono::hours(1));
    problem(changed); // layers that were there before
    CHECK(problem(changed).find("written to") != std::string::npos);
}

static void says_what_is_wrong(ring_mode mode) {
    model      file(temporary());
    layer_ring ring(settings(mode));
    fill(ring, file.fd);
    CHECK(problem(ring).empty());

#ifdef _WIN32 // where an open file keeps its name, and a mapped one its length
    if (mode == ring_mode::prefetch) {
        return;
    }
#else
    CHECK(unlink(file.path.c_str()) == 0); // who has it open still reads it
    CHECK(problem(ring).empty());
#endif
    CHECK(ftruncate(file.fd, file.bytes.size() / 2) == 0);
    const std::string shorter = problem(ring);
    CHECK(shorter.find(FINDS_NAMES ? file.path : "the model's file") == 0);
    CHECK(shorter.find("shorter") != std::string::npos);
    CHECK(!problem(ring).empty()); // and again
}

// Who says stop has taken a signal's exception, which would be lost if the pass went on: it ends although the layer has
// come meanwhile. A signal holds the reader.
#ifdef __linux__
static std::set<int> threads() {
    std::set<int> found;
    for (const auto & entry : std::filesystem::directory_iterator("/proc/self/task")) {
        found.insert(std::stoi(entry.path().filename()));
    }
    return found;
}

static std::atomic<bool> reader_waits{ false }, reader_goes{ false };

static void wait_in_reader(int) {
    reader_waits = true;
    while (!reader_goes) {
        usleep(1000);
    }
}

static void stops_though_the_layer_came(const model & file) {
    const auto    before = threads();
    ring_settings one    = settings(ring_mode::direct, 2);
    one.n_threads        = 1;
    layer_ring ring(one);
    fill(ring, file.fd);
    while (ring.stats().n_layers < 2) {
        usleep(1000);
    }
    signal(SIGUSR1, wait_in_reader);
    for (const int thread : threads()) {
        if (before.count(thread) == 0) {
            CHECK(syscall(SYS_tgkill, getpid(), thread, SIGUSR1) == 0);
        }
    }
    while (!reader_waits) {
        usleep(1000);
    }
    bool stopped = false;
    try {
        ring.hold(4, [&] {
            reader_goes  = true;
            const auto n = ring.stats().n_layers;
            while (ring.stats().n_layers == n) {
                usleep(1000);
            }
            return true;
        });
    } catch (const interrupted_error &) {
        stopped = true;
    }
    CHECK(stopped);
    CHECK(holds(ring, file, 4));
}
#endif

int main() {
    for (const auto mode : { ring_mode::direct, ring_mode::prefetch }) {
        reads_what_is_there(model(temporary()), mode);
        if (access("/dev/shm", W_OK) == 0) {
            reads_what_is_there(model("/dev/shm"), mode);
        }
        says_what_is_wrong(mode);
        says_that_it_was_written_to(mode);
    }
    holds_two_at_a_time(model(temporary()));
#ifdef __linux__
    stops_though_the_layer_came(model(temporary()));
#endif
    return 0;
}
