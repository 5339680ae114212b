// The choice of the body. Compiled for the baseline.

#include "columns.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string>
#include <utility>

namespace mixedkv {
namespace {

std::string variable(const char * name) {
    const char * const value = std::getenv(name);
    return value ? value : "";
}

std::string why_no_bf16(const std::string & isa) {
    if (find_weights("bf16", false)) {
        return "MIXEDKV_WEIGHTS=bf16 is for the amx kernels, and MIXEDKV_ISA='" + isa + "' forces others: unset either";
    }
    return "MIXEDKV_WEIGHTS=bf16 needs a processor with AMX, which this machine lacks: unset it";
}

// Without a body for the processor llama.cpp's own products are faster than the twin, which is taken only when forced.
struct bodies {
    const weights_kernels * quantised = nullptr;
    const weights_kernels * tiles     = nullptr; // quantised rows, WEIGHTS_TILE_COLUMNS or more
    const weights_kernels * bf16      = nullptr; // the same if asked for, WEIGHTS_BF16_COLUMNS or more
    const weights_kernels * f16_one   = nullptr; // rows in 16 bits, a single column
    const weights_kernels * f16_many  = nullptr; // WEIGHTS_F16_COLUMNS or more

    const std::string choice = variable("MIXEDKV_WEIGHTS");
    std::string       error;

    bodies() {
        const std::string isa = variable("MIXEDKV_ISA");
        if (choice == "bf16") {
            bf16  = isa.empty() || isa == "amx" ? find_weights("bf16", false) : nullptr;
            error = bf16 ? "" : why_no_bf16(isa);
        } else if (!choice.empty() && choice != "llama.cpp") {
            error = "MIXEDKV_WEIGHTS='" + choice +
                    "' is not known: use bf16 (on a processor with AMX) or llama.cpp, or unset it";
        }
        if (choice == "llama.cpp") {
            return;
        }
        if (isa == "scalar") {
            quantised = weights_scalar();
            return;
        }
        if (isa.empty() || isa == "amx") {
            f16_many = find_weights("amx", true);
            tiles    = find_weights("amx", false);
        }
        if (isa != "avx2" && isa != "avxvnni") {
            quantised = find_weights("avx512", false);
            f16_one   = find_weights("avx512", true);
        }
        if (!quantised && isa != "avx2") {
            quantised = find_weights("avxvnni", false);
        }
        if (!quantised) {
            quantised = find_weights("avx2", false);
        }
        for (const char * arm : { "i8mm", "dotprod", "neon" }) {
            if (!quantised && (isa.empty() || isa == arm)) {
                quantised = find_weights(arm, false);
            }
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

// Whether the body that was chosen reads this quantised type; some read no interleaved rows
bool is_read(int type) {
    bool res = false;
    with_row_type(type, [&](auto * row) {
        res = chosen().quantised && traits<row_of<decltype(row)>>.together <= chosen().quantised->together;
    });
    return res;
}

// What rows of a quantised type want of the columns: their bias, and how many scales they have in a block
std::pair<int, int> packing_of(int type) {
    std::pair<int, int> res(0, 1);
    with_row_type(type, [&](auto * row) {
        constexpr row_traits of_row = traits<row_of<decltype(row)>>;
        res                         = { of_row.bias, of_row.scales };
    });
    return res;
}

// Not Q6_K: with two scales in a block vectors would have twice the work, and are faster alone.
bool by_tiles(int type, int64_t n_columns) {
    return chosen().tiles && n_columns >= WEIGHTS_TILE_COLUMNS && packing_of(type).second == 1;
}

bool by_bf16(int64_t n_columns) {
    return chosen().bf16 && n_columns >= WEIGHTS_BF16_COLUMNS;
}

// Null where llama.cpp makes the product. Of columns that are chosen few go to one product and many to another; they
// are packed for the body of few, whose layout tiles take as it is.
const weights_kernels * body_of(int type, int64_t n_columns, bool are_chosen) {
    if (is_half(type)) {
        return n_columns == 1 ? chosen().f16_one : n_columns >= WEIGHTS_F16_COLUMNS ? chosen().f16_many : nullptr;
    }
    if (!is_read(type)) {
        return nullptr;
    }
    if (by_bf16(n_columns) && !are_chosen) {
        return chosen().bf16;
    }
    return by_tiles(type, n_columns) ? chosen().tiles : chosen().quantised;
}

// That these columns are packed for
const weights_kernels * packed_by(const weights_columns & columns) {
    return columns.are_chosen ? chosen().quantised : body_of(columns.type, columns.n_columns, false);
}

// Rows that are not wanted
void fill(const weights_product & p, int64_t row_0, int64_t row_1) {
    for (int64_t c = 0; c < p.n_columns; c++) {
        float * out = out_column(p, c);
        std::fill(out + row_0, out + row_1, -std::numeric_limits<float>::infinity());
    }
}

} // namespace

const weights_kernels * find_weights(const char * name, bool of_halves) {
    for (const auto make : { MIXEDKV_BODIES }) {
        const weights_kernels * body = make();
        if (std::strcmp(body->name, name) == 0 && body->of_halves == of_halves && body->supported()) {
            return body;
        }
    }
    return nullptr;
}

} // namespace mixedkv

using namespace mixedkv;

bool weights_supported(int type, int64_t n_columns) {
    return body_of(type, n_columns, false);
}

size_t weights_columns_bytes(const weights_columns * columns) {
    return packed_by(*columns)->columns_bytes(columns->type, columns->n_elements, columns->n_columns);
}

void weights_pack(const weights_columns * columns, const float * x, int64_t column, int64_t first, int64_t n) {
    packed_by(*columns)->pack(*columns, x, column, first, n);
}

bool weights_packed_alike(int a, int b, int64_t n_columns) {
    if (is_half(a) || is_half(b)) {
        return a == b;
    }
    if (by_bf16(n_columns)) {
        return true;
    }
    const bool tiles = by_tiles(a, n_columns);
    return tiles == by_tiles(b, n_columns) && (tiles || packing_of(a) == packing_of(b));
}

const char * weights_isa(void) {
    return chosen().quantised ? chosen().quantised->name : "llama.cpp";
}

const char * weights_choice(void) {
    return chosen().choice.c_str();
}

const char * weights_error(void) {
    return chosen().error.empty() ? nullptr : chosen().error.c_str();
}

bool weights_same_bits(int type) {
    return !is_half(type) && is_read(type) && !chosen().bf16;
}

bool weights_keep_layout(int type) {
    return weights_repacked(type) < 0 && weights_same_bits(type);
}

size_t weights_work_bytes(const weights_columns * columns) {
    if (!columns->are_chosen) {
        return packed_by(*columns)->work_bytes(columns->n_elements, 0);
    }
    // Which columns are chosen is known only when it runs, and one may be chosen twice, so more than there are. Ask for
    // any number: the kernel limits it to a tile.
    const int64_t any = std::numeric_limits<int32_t>::max();
    return (chosen().tiles ? chosen().tiles : chosen().quantised)->work_bytes(columns->n_elements, any);
}

void weights_run(const weights_product * product, void * work, int64_t row_0, int64_t row_1) {
    const auto run = body_of(product->type, product->n_columns, product->chosen)->run;
    if (!product->wanted) {
        return run(*product, work, row_0, row_1);
    }
    const auto is_wanted = [&](int64_t row) { return product->wanted[row / WEIGHTS_ROWS] != 0; };
    for (int64_t r = row_0, end; r < row_1; r = end) {
        for (end = r + WEIGHTS_ROWS; end < row_1 && is_wanted(end) == is_wanted(r);) {
            end += WEIGHTS_ROWS;
        }
        end = std::min(end, row_1);
        if (is_wanted(r)) {
            run(*product, work, r, end);
        } else {
            fill(*product, r, end);
        }
    }
}
