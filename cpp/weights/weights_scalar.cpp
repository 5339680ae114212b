// The twin that the others are compared with, bit by bit.

#include "columns.h"

#include <cmath>
#include <cstring>
#include <type_traits>

namespace mixedkv {
namespace {

// a * b + c, rounded once as instructions do it
float fused(float a, float b, float c) {
#ifdef __MINGW32__                        // whose std::fma rounds the product too
    const double product = double(a) * b; // exact
    const double sum     = product + c;
    const double c_part  = sum - product;
    const double lost    = (product - (sum - c_part)) + (c - c_part);
    if (lost == 0.0 || !std::isfinite(sum)) {
        return float(sum);
    }
    uint64_t bits; // made odd, a sum that was rounded lies on no border of what is rounded now
    std::memcpy(&bits, &sum, sizeof(sum));
    if (bits % 2 == 0) {
        bits += (lost > 0) == (sum > 0) ? 1 : -1;
    }
    double odd;
    std::memcpy(&odd, &bits, sizeof(odd));
    return float(odd);
#else
    return std::fma(a, b, c);
#endif
}

struct unpacked_block {
    uint8_t values[WEIGHTS_BLOCK];
    float   scale[2]; // of each half, or the first alone
    float   least;
};

void unpack_nibbles(const uint8_t * nibbles, uint8_t * values) {
    for (int i = 0; i < 16; i++) {
        values[i]      = nibbles[i] & 15;
        values[i + 16] = nibbles[i] >> 4;
    }
}

void unpack_fifth(const uint8_t * fifth, uint8_t * values) {
    for (int i = 0; i < WEIGHTS_BLOCK; i++) {
        values[i] |= (fifth[i / 8] >> i % 8 & 1) << 4;
    }
}

// Block b of a struct
void unpack(const row_q4_0 & row, int, unpacked_block & out) {
    unpack_nibbles(row.nibbles, out.values);
    out.scale[0] = half_to_float(row.scale);
}

void unpack(const row_q4_1 & row, int, unpacked_block & out) {
    unpack_nibbles(row.nibbles, out.values);
    out.scale[0] = half_to_float(row.scale);
    out.least    = half_to_float(row.least);
}

void unpack(const row_q5_0 & row, int, unpacked_block & out) {
    unpack_nibbles(row.nibbles, out.values);
    unpack_fifth(row.fifth, out.values);
    out.scale[0] = half_to_float(row.scale);
}

void unpack(const row_q5_1 & row, int, unpacked_block & out) {
    unpack_nibbles(row.nibbles, out.values);
    unpack_fifth(row.fifth, out.values);
    out.scale[0] = half_to_float(row.scale);
    out.least    = half_to_float(row.least);
}

void unpack(const row_q8_0 & row, int, unpacked_block & out) {
    for (int i = 0; i < WEIGHTS_BLOCK; i++) {
        out.values[i] = uint8_t(row.values[i] + 128);
    }
    out.scale[0] = half_to_float(row.scale);
}

// Of Q4_K and Q5_K: factor i of the eight in 12 bytes
void unpack_factors(const uint8_t * f, int i, uint16_t of_scales, uint16_t of_leasts, unpacked_block & out) {
    const int scale = i < 4 ? f[i] & 63 : (f[i + 4] & 15) | f[i - 4] >> 6 << 4;
    const int least = i < 4 ? f[i + 4] & 63 : f[i + 4] >> 4 | f[i] >> 6 << 4;
    out.scale[0]    = half_to_float(of_scales) * float(scale);
    out.least       = -half_to_float(of_leasts) * float(least);
}

template <class Row>
void unpack_k4(const Row & row, int b, unpacked_block & out) {
    unpack_factors(row.factors, b, row.scale, row.least, out);
    for (int i = 0; i < WEIGHTS_BLOCK; i++) {
        out.values[i] = row.nibbles[b / 2 * 32 + i] >> b % 2 * 4 & 15;
    }
}

void unpack(const row_q4_k & row, int b, unpacked_block & out) {
    unpack_k4(row, b, out);
}

void unpack(const row_q5_k & row, int b, unpacked_block & out) {
    unpack_k4(row, b, out);
    for (int i = 0; i < WEIGHTS_BLOCK; i++) {
        out.values[i] |= (row.fifth[i] >> b & 1) << 4;
    }
}

void unpack(const row_q6_k & row, int b, unpacked_block & out) {
    const uint8_t * nibbles = row.nibbles + b / 4 * 64 + b % 2 * 32;
    for (int i = 0; i < WEIGHTS_BLOCK; i++) {
        out.values[i] = (nibbles[i] >> b % 4 / 2 * 4 & 15) | (row.upper[b / 4 * 32 + i] >> b % 4 * 2 & 3) << 4;
    }
    for (int half = 0; half < 2; half++) {
        out.scale[half] = half_to_float(row.scale) * float(row.factors[2 * b + half]);
    }
}

// 2 to the power of x - 128
float power_of(uint8_t x) {
    return std::ldexp(1.0f, x - 128);
}

void look_up(uint8_t * values) {
    for (int i = 0; i < WEIGHTS_BLOCK; i++) {
        values[i] = mxfp4_values[values[i]];
    }
}

void unpack(const row_mxfp4 & row, int, unpacked_block & out) {
    unpack_nibbles(row.nibbles, out.values);
    look_up(out.values);
    out.scale[0] = power_of(row.exponent);
}

// Byte i of row r among eight
int in_eight(int r, int i) {
    return i / 8 * 64 + r * 8 + i % 8;
}

void unpack(const rows_q4_0_x8 & rows, int r, int, unpacked_block & out) {
    uint8_t nibbles[16];
    for (int i = 0; i < 16; i++) {
        nibbles[i] = rows.nibbles[in_eight(r, i)] ^ 0x88;
    }
    unpack_nibbles(nibbles, out.values);
    out.scale[0] = half_to_float(rows.scale[r]);
}

void unpack(const rows_q4_k_x8 & rows, int r, int b, unpacked_block & out) {
    unpack_factors(rows.factors[b], r, rows.scale[r], rows.least[r], out);
    for (int i = 0; i < WEIGHTS_BLOCK; i++) {
        out.values[i] = rows.nibbles[in_eight(r, b / 2 * 32 + i)] >> b % 2 * 4 & 15;
    }
}

void unpack(const rows_mxfp4_x8 & rows, int r, int, unpacked_block & out) {
    uint8_t nibbles[16];
    for (int i = 0; i < 16; i++) {
        nibbles[i] = rows.nibbles[in_eight(r, i)];
    }
    unpack_nibbles(nibbles, out.values);
    look_up(out.values);
    out.scale[0] = power_of(rows.exponent[r]);
}

template <class Row>
void unpack(const Row & row, int, int b, unpacked_block & out) {
    unpack(row, b, out);
}

// Row r of those that lie together
template <class Row>
float product(const Row * row, int r, const column_block * column, int64_t n_blocks) {
    constexpr int part = WEIGHTS_BLOCK / traits<Row>.scales;
    float         sum  = 0.0f;
    for (int64_t b = 0; b < n_blocks; b++) {
        unpacked_block w;
        unpack(row[b / traits<Row>.blocks], r, int(b % traits<Row>.blocks), w);
        for (int s = 0; s < traits<Row>.scales; s++) {
            int32_t whole = 0;
            for (int i = s * part; i < (s + 1) * part; i++) {
                whole += (w.values[i] - traits<Row>.bias) * column[b].group(i / 4)[i % 4];
            }
            sum = fused(float(whole), w.scale[s] * column[b].scale, sum);
        }
        if (traits<Row>.has_least) {
            sum = fused(w.least, column[b].sum, sum);
        }
    }
    return sum;
}

template <class Row>
void run_type(const weights_product & p, int64_t row_0, int64_t row_1) {
    const int64_t n_blocks = p.n_elements / WEIGHTS_BLOCK;
    for (int64_t c = 0; c < p.n_columns; c++) {
        const column_block * column = packed_column(p, c);
        float *              out    = out_column(p, c);
        for (int64_t r = row_0; r < row_1; r++) {
            const int64_t in  = r % traits<Row>.together;
            const char *  row = static_cast<const char *>(p.rows) + (r - in) * p.row_bytes;
            out[r]            = product(reinterpret_cast<const Row *>(row), int(in), column, n_blocks);
        }
    }
}

void run(const weights_product & p, void *, int64_t row_0, int64_t row_1) {
    with_row_type(p.type, [&](auto * row) { run_type<row_of<decltype(row)>>(p, row_0, row_1); });
}

bool supported() {
    return true;
}

} // namespace

const weights_kernels * weights_scalar() {
    static const weights_kernels kernels = { "scalar",        false,          8,  supported, no_work_bytes,
                                             quantised_bytes, pack_quantised, run };
    return &kernels;
}

} // namespace mixedkv
