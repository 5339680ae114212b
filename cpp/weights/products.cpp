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

const weights_kernels * integers_of(int type, int64_t n_columns) {
    return by_tiles(type, n_columns) ? chosen().tiles : chosen().quantised;
}

// Null where llama.cpp makes the product
const weights_kernels * body_of(int type, int64_t n_columns) {
    if (is_half(type)) {
        return n_columns == 1 ? chosen().f16_one : n_columns >= WEIGHTS_F16_COLUMNS ? chosen().f16_many : nullptr;
    }
    if (!is_read(type)) {
        return nullptr;
    }
    return by_bf16(n_columns) ? chosen().bf16 : integers_of(type, n_columns);
}

// That these columns are packed for. Of columns that are chosen few go to one product and many to another: they are
// packed for the body of few, whose layout tiles take as it is, and behind that for BF16 if it is asked for.
const weights_kernels * packed_by(const weights_columns & columns) {
    return columns.are_chosen ? chosen().quantised : body_of(columns.type, columns.n_columns);
}

bool are_packed_twice(const weights_columns & columns) {
    return columns.are_chosen && by_bf16(columns.n_columns);
}

// Bytes of columns as packed by packed_by(), up to where they lie for BF16
size_t first_bytes(int type, int64_t n_elements, int64_t n_columns) {
    const size_t bytes = chosen().quantised->columns_bytes(type, n_elements, n_columns);
    return (bytes + WEIGHTS_ALIGNMENT - 1) / WEIGHTS_ALIGNMENT * WEIGHTS_ALIGNMENT;
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
    return body_of(type, n_columns);
}

size_t weights_columns_bytes(const weights_columns * columns) {
    const weights_columns & c = *columns;
    if (are_packed_twice(c)) {
        return first_bytes(c.type, c.n_elements, c.n_columns) +
               chosen().bf16->columns_bytes(c.type, c.n_elements, c.n_columns);
    }
    return packed_by(c)->columns_bytes(c.type, c.n_elements, c.n_columns);
}

void weights_pack(const weights_columns * columns, const float * x, int64_t column, int64_t first, int64_t n) {
    packed_by(*columns)->pack(*columns, x, column, first, n);
    if (are_packed_twice(*columns)) {
        weights_columns again = *columns;
        again.packed = static_cast<char *>(again.packed) + first_bytes(again.type, again.n_elements, again.n_columns);
        chosen().bf16->pack(again, x, column, first, n);
    }
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
    // any number: a body limits it to what it gathers at a time.
    const int64_t any = std::numeric_limits<int32_t>::max();
    size_t        res = 0;
    for (const weights_kernels * body : { chosen().quantised, chosen().tiles, chosen().bf16 }) {
        res = std::max(res, body ? body->work_bytes(columns->n_elements, any) : 0);
    }
    return res;
}

void weights_run(const weights_product * product, void * work, int64_t row_0, int64_t row_1) {
    weights_product p       = *product;
    const bool      in_bf16 = by_bf16(p.n_columns) && (!p.chosen || by_bf16(p.n_packed));
    const auto *    body    = p.chosen && !in_bf16 ? integers_of(p.type, p.n_columns) : body_of(p.type, p.n_columns);
    if (p.chosen && in_bf16) {
        p.columns = static_cast<const char *>(p.columns) + first_bytes(p.type, p.n_elements, p.n_packed);
    }
    if (!p.wanted) {
        return body->run(p, work, row_0, row_1);
    }
    const auto is_wanted = [&](int64_t row) { return p.wanted[row / WEIGHTS_ROWS] != 0; };
    for (int64_t r = row_0, end; r < row_1; r = end) {
        for (end = r + WEIGHTS_ROWS; end < row_1 && is_wanted(end) == is_wanted(r);) {
            end += WEIGHTS_ROWS;
        }
        end = std::min(end, row_1);
        if (is_wanted(r)) {
            body->run(p, work, r, end);
        } else {
            fill(p, r, end);
        }
    }
}
