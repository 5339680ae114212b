// The choice of the body, and the packing of columns. Compiled for the baseline.

#include "bodies.h"

#include <cstdlib>
#include <string>
#include <utility>

namespace mixedkv {
namespace {

bool is_set(const char * name, const char * value) {
    const char * is = std::getenv(name);
    return is && std::strcmp(is, value) == 0;
}

// Without a body for the processor llama.cpp's own products are faster than the twin, which is taken only when forced.
const weights_kernels * choose() {
    const char *      isa  = std::getenv("MIXEDKV_ISA");
    const std::string name = isa ? isa : "";
    if (is_set("MIXEDKV_WEIGHTS", "llama.cpp")) {
        return nullptr;
    }
    if (name == "scalar") {
        return weights_scalar();
    }
    if (name == "neon") {
        return nullptr;
    }
    const weights_kernels * avx512 = weights_avx512();
    const weights_kernels * avx2   = weights_avx2();
    if (name != "avx2" && name != "avxvnni" && avx512 && avx512->supported()) {
        return avx512;
    }
    return avx2 && avx2->supported() ? avx2 : nullptr;
}

const weights_kernels * kernels() {
    static const weights_kernels * const chosen = choose();
    return chosen;
}

// What rows of a type want of the columns: their bias, and how many scales they have in a block
std::pair<int, int> packing_of(int type) {
    std::pair<int, int> res(0, 1);
    with_row_type(type, [&](auto * row) { res = { row->bias, row->scales }; });
    return res;
}

} // namespace
} // namespace mixedkv

using namespace mixedkv;

bool weights_supported(int type, int64_t n_columns) {
    static const bool all = is_set("MIXEDKV_WEIGHTS", "all");
    bool              own = all || n_columns > 1;
    return with_row_type(type, [&](auto * row) { own = own || row->faster_alone; }) && own && kernels();
}

size_t weights_column_bytes(int64_t n_elements) {
    return n_elements / WEIGHTS_BLOCK * sizeof(column_block);
}

void weights_pack(int type, const void * blocks, void * packed, int64_t n_blocks) {
    const auto * in           = static_cast<const column_q8_0 *>(blocks);
    auto *       out          = static_cast<column_block *>(packed);
    const auto [bias, scales] = packing_of(type);
    for (int64_t b = 0; b < n_blocks; b++) {
        int first = 0, second = 0;
        for (int i = 0; i < WEIGHTS_BLOCK / 2; i++) {
            first += in[b].values[i];
            second += in[b].values[i + WEIGHTS_BLOCK / 2];
        }
        out[b].scale    = half_to_float(in[b].scale);
        out[b].sum      = out[b].scale * float(first + second);
        out[b].start[0] = -bias * (scales == 1 ? first + second : first);
        out[b].start[1] = -bias * second;
        std::memset(out[b].halves, 0, sizeof(out[b].halves));
        std::memcpy(out[b].halves[0] + 2, in[b].values, WEIGHTS_BLOCK / 2);
        std::memcpy(out[b].halves[1] + 2, in[b].values + WEIGHTS_BLOCK / 2, WEIGHTS_BLOCK / 2);
    }
}

bool weights_packed_alike(int a, int b) {
    return packing_of(a) == packing_of(b);
}

void weights_run(const weights_product * product, int64_t row_0, int64_t row_1) {
    kernels()->run(*product, row_0, row_1);
}
