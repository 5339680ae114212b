// Times and checks the CUDA kernels of cpp/attention alone: no model, no llama.cpp, no Python.
//
//   kernel_times [--heads 128,64,256] [--depths 4096,16384,32768,131072] [--tokens 512] [--rounds 3]
//                [--n-head 32] [--n-head-kv 8]
//
// For each head size and pair of types: decode of one token and a prompt of `--tokens` at each depth, microseconds of
// a layer, TB/s of the rows of K and V or TFLOP/s. A star marks the shortest time of a column; below a table stand the
// means of each variant's times by those of the one that the package has. Results are compared with a plain kernel at
// the first depth and with the package's at the others: FAIL lines, and exit code 1. Without a device: exit code 2.

#include "cuda_timer.h"
#include "kernel_times.h"

#include <cstdlib>
#include <cstring>

using namespace mixedkv::cuda;

int times_of_heads_64(cuda_timer & device, const times_options & options);
int times_of_heads_128(cuda_timer & device, const times_options & options);
int times_of_heads_256(cuda_timer & device, const times_options & options);

static std::vector<int> numbers(const char * text) {
    std::vector<int> res;
    for (const char * at = text; at; at = std::strchr(at, ',') ? std::strchr(at, ',') + 1 : nullptr) {
        res.push_back(std::atoi(at));
    }
    return res;
}

static int refuse(const std::string & why) {
    std::fprintf(stderr, "kernel_times: %s\n", why.c_str());
    return 2;
}

int main(int argc, char ** argv) {
    times_options    o;
    std::vector<int> heads{ 128, 64, 256 };
    for (int i = 1; i < argc; i += 2) {
        const std::string name = argv[i];
        if (i + 1 == argc) {
            return refuse(name + " lacks a value");
        }
        const std::vector<int> all = numbers(argv[i + 1]);
        if (name == "--heads") {
            heads = all;
        } else if (name == "--depths") {
            o.depths = all;
        } else if (name == "--tokens") {
            o.tokens = all[0];
        } else if (name == "--rounds") {
            o.rounds = all[0];
        } else if (name == "--n-head") {
            o.n_head = all[0];
        } else if (name == "--n-head-kv") {
            o.n_head_kv = all[0];
        } else {
            return refuse("unknown option " + name);
        }
    }
    if (o.rounds < 1 || o.n_head_kv < 1 || o.n_head % o.n_head_kv != 0) {
        return refuse("give at least one round, and heads that are a multiple of KV heads");
    }
    if (o.tokens * o.n_head / o.n_head_kv <= decode_rows) {
        return refuse("so few --tokens are decode: give more");
    }
    for (const int depth : o.depths) {
        if (depth < o.tokens || depth % 8 != 0) {
            return refuse("depth " + std::to_string(depth) + " is no multiple of 8 of at least --tokens");
        }
    }
    int n_devices = 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
        return refuse("no CUDA device");
    }
    cuda_timer device;
    if (!device.has_tensor_cores()) {
        return refuse(std::string(device.name()) + " is older than Ampere");
    }
    std::printf("%s, %d multiprocessors\n", device.name(), device.n_processors());
    int failures = 0;
    for (const int d : heads) {
        if (d != 64 && d != 128 && d != 256) {
            return refuse("no kernels are built for heads of " + std::to_string(d) + ": give 64, 128 or 256");
        }
        failures += (d == 64 ? times_of_heads_64 : d == 128 ? times_of_heads_128 : times_of_heads_256)(device, o);
    }
    std::printf("\n%d results differ\n", failures);
    return failures ? 1 : 0;
}
