// The choice of the body. Compiled for the baseline.

#include "columns.h"

#include <cstdlib>
#include <string>
#include <utility>

namespace mixedkv {
namespace {

bool is_set(const char * name, const char * value) {
    const char * is = std::getenv(name);
    return is && std::strcmp(is, value) == 0;
}

const weights_kernels * if_supported(const weights_kernels * body) {
    return body && body->supported() ? body : nullptr;
}

// For quantised rows, and for those in 16 bits. Without a body for the processor llama.cpp's own products are faster
// than the twin, which is taken only when forced.
struct bodies {
    const weights_kernels * quantised = nullptr;
    const weights_kernels * halves    = nullptr;

    bodies() {
        const char *      forced = std::getenv("MIXEDKV_ISA");
        const std::string isa    = forced ? forced : "";
        if (is_set("MIXEDKV_WEIGHTS", "llama.cpp") || isa == "neon") {
            return;
        }
        if (isa == "scalar") {
            quantised = weights_scalar();
            return;
        }
        if (isa.empty() || isa == "amx") {
            halves = if_supported(weights_amx());
        }
        if (isa != "avx2" && isa != "avxvnni") {
            quantised = if_supported(weights_avx512());
        }
        if (!quantised && isa != "avx2") {
            quantised = if_supported(weights_avxvnni());
        }
        if (!quantised) {
            quantised = if_supported(weights_avx2());
        }
    }
};

const bodies & chosen() {
    static const bodies res;
    return res;
}

bool is_half(int type) {
    return type == WEIGHTS_F16 || type == WEIGHTS_BF16;
}

const weights_kernels & body_of(int type) {
    return is_half(type) ? *chosen().halves : *chosen().quantised;
}

// What rows of a quantised type want of the columns: their bias, and how many scales they have in a block
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
    if (is_half(type)) {
        return chosen().halves && (all || n_columns >= WEIGHTS_HALVES_COLUMNS);
    }
    bool own = all || n_columns > 1;
    return with_row_type(type, [&](auto * row) { own = own || row->faster_alone; }) && own && chosen().quantised;
}

size_t weights_columns_bytes(int type, int64_t n_elements, int64_t n_columns) {
    if (is_half(type)) { // tiles of 16, with two parts of an F16
        return size_t((n_columns + 15) / 16 * 16 * n_elements * (type == WEIGHTS_F16 ? 4 : 2));
    }
    return size_t(n_columns) * column_bytes(n_elements);
}

void weights_pack(const weights_columns * columns, const float * x, int64_t column, int64_t first, int64_t n) {
    body_of(columns->type).pack(*columns, x, column, first, n);
}

bool weights_packed_alike(int a, int b) {
    return is_half(a) || is_half(b) ? a == b : packing_of(a) == packing_of(b);
}

size_t weights_work_bytes(int type) {
    return body_of(type).work_bytes;
}

void weights_run(const weights_product * product, void * work, int64_t row_0, int64_t row_1) {
    body_of(product->type).run(*product, work, row_0, row_1);
}
