// FEAT_I8MM: 8 rows by 4 columns. An instruction multiplies eight elements of two columns with those of two rows. Few
// columns are multiplied by the body for FEAT_DotProd.

#include "bodies.h"

#include "lanes_dotprod.h"

namespace mixedkv {

bool cpu_has_i8mm(); // attention/cpu.cpp

namespace {

struct i8mm : dotprod {
    static constexpr int decode_columns = 0; // run() leaves few to dotprod

    // Two groups of four rows become eight elements of two rows, and of the two others.
    template <class Values>
    MIXEDKV_INLINE static void arrange(Values & values, int at) {
#pragma GCC unroll 4
        for (int g = 0; g < groups; g += 2) {
            const uint32x4_t a = uint32x4_t(values[g][at]), b = uint32x4_t(values[g + 1][at]);
            values[g][at]     = ints(vzip1q_u32(a, b));
            values[g + 1][at] = ints(vzip2q_u32(a, b));
        }
    }
};

// Eight elements of two columns: one behind the other
inline int8x16_t two_columns(const column_block & a, const column_block & b, int eight) {
    const int64x2_t x = vreinterpretq_s64_s8(dotprod::load_half(a, eight / 2));
    const int64x2_t y = vreinterpretq_s64_s8(dotprod::load_half(b, eight / 2));
    return vreinterpretq_s8_s64(eight % 2 ? vzip2q_s64(x, y) : vzip1q_s64(x, y));
}

template <class Row, int N, int Columns>
struct block_sums<i8mm, Row, N, Columns> {
    static constexpr int eights = groups / 2 / traits<Row>.scales;
    static constexpr int pairs  = (Columns + 1) / 2; // of columns; an odd last one is paired with itself

    int32x4_t whole[pairs][N][2]; // two rows with a column and with the next, and the next two rows

    MIXEDKV_INLINE void add(const panel_block<i8mm, Row, N> & w, const column_block * const * in, int64_t block,
                            int s) {
#pragma GCC unroll 4
        for (int p = 0; p < pairs; p++) {
#pragma GCC unroll 4
            for (int i = 0; i < N; i++) {
                whole[p][i][0] = whole[p][i][1] = vdupq_n_s32(0);
            }
        }
#pragma GCC unroll 4
        for (int e = s * eights; e < (s + 1) * eights; e++) {
            int8x16_t x[pairs];
#pragma GCC unroll 4
            for (int p = 0; p < pairs; p++) {
                const int other = 2 * p + 1 < Columns ? 2 * p + 1 : 2 * p;
                x[p]            = two_columns(in[2 * p][block], in[other][block], e);
            }
#pragma GCC unroll 4
            for (int i = 0; i < N; i++) {
#pragma GCC unroll 2
                for (int two = 0; two < 2; two++) {
                    const int8x16_t rows = i8mm::signed_bytes(w.values[2 * e + two][i]);
#pragma GCC unroll 4
                    for (int p = 0; p < pairs; p++) {
                        whole[p][i][two] = vmmlaq_s32(whole[p][i][two], x[p], rows);
                    }
                }
            }
        }
    }

    MIXEDKV_INLINE i8mm::ints of(int column, int at) const {
        const int32x4_t * two   = whole[column / 2][at];
        const int64x2_t   first = vreinterpretq_s64_s32(two[0]), next = vreinterpretq_s64_s32(two[1]);
        return i8mm::ints(column % 2 ? vzip2q_s64(first, next) : vzip1q_s64(first, next));
    }
};

void run(const weights_product & p, void * work, int64_t row_0, int64_t row_1) {
    if (p.n_columns <= dotprod::decode_columns) {
        return weights_dotprod()->run(p, work, row_0, row_1);
    }
    run_body<i8mm>(p, work, row_0, row_1);
}

} // namespace

const weights_kernels * weights_i8mm() {
    static const weights_kernels kernels = { "i8mm",          false,          1,  cpu_has_i8mm, no_work_bytes,
                                             quantised_bytes, pack_quantised, run };
    return &kernels;
}

} // namespace mixedkv
