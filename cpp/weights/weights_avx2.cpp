// AVX2: 16 rows by 4 columns. Rows are opened into a panel: of 8 rows, four bytes each of the same elements lie in one
// vector, so that the sums of a block end in one lane a row and nothing is summed across lanes. A panel is opened once
// for all columns.

#include "bodies.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

namespace mixedkv {

bool cpu_has_avx2(); // attention/cpu.cpp

namespace {

constexpr int groups = WEIGHTS_BLOCK / 4; // of four elements, which one lane multiplies at once
constexpr int halves = panel_rows / 8;

struct panel_block {
    __m256i values[groups][halves]; // unsigned bytes
    __m256  scale[halves];
    __m256  least[halves];
};

struct panel {
    panel_block blocks[panel_blocks];
};

// Dwords i of rows 0 to 7 into vector i
void transpose(const __m256i in[4], __m256i out[4]) {
    const __m256i a = _mm256_unpacklo_epi32(in[0], in[1]);
    const __m256i b = _mm256_unpackhi_epi32(in[0], in[1]);
    const __m256i c = _mm256_unpacklo_epi32(in[2], in[3]);
    const __m256i d = _mm256_unpackhi_epi32(in[2], in[3]);
    out[0]          = _mm256_unpacklo_epi64(a, c);
    out[1]          = _mm256_unpackhi_epi64(a, c);
    out[2]          = _mm256_unpacklo_epi64(b, d);
    out[3]          = _mm256_unpackhi_epi64(b, d);
}

// 16 bytes of a row and of the fourth after it
__m256i load_pair(const uint8_t * low, const uint8_t * high) {
    const __m256i x = _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(low)));
    return _mm256_inserti128_si256(x, _mm_loadu_si128(reinterpret_cast<const __m128i *>(high)), 1);
}

int dword_at(const void * p) {
    int x;
    std::memcpy(&x, p, 4);
    return x;
}

// A block of 8 rows
struct opened {
    __m256i values[groups];
    __m256  scale, least;
};

inline __attribute__((always_inline)) opened open_q4_1(const row_q4_1 * const rows[8], int64_t b) {
    const __m256i low = _mm256_set1_epi8(15);
    __m256i       lines[4], nibbles[4];
    opened        out;
    for (int i = 0; i < 4; i++) {
        lines[i] = load_pair(rows[i][b].nibbles, rows[i + 4][b].nibbles);
    }
    transpose(lines, nibbles);
    for (int i = 0; i < 4; i++) {
        out.values[i]     = _mm256_and_si256(nibbles[i], low);
        out.values[i + 4] = _mm256_and_si256(_mm256_srli_epi16(nibbles[i], 4), low);
    }
    const __m256i both =
        _mm256_setr_epi32(dword_at(rows[0] + b), dword_at(rows[1] + b), dword_at(rows[2] + b), dword_at(rows[3] + b),
                          dword_at(rows[4] + b), dword_at(rows[5] + b), dword_at(rows[6] + b), dword_at(rows[7] + b));
    const __m256i apart = _mm256_permute4x64_epi64(
        _mm256_packus_epi32(_mm256_and_si256(both, _mm256_set1_epi32(0xffff)), _mm256_srli_epi32(both, 16)),
        _MM_SHUFFLE(3, 1, 2, 0));
    out.scale = _mm256_cvtph_ps(_mm256_castsi256_si128(apart));
    out.least = _mm256_cvtph_ps(_mm256_extracti128_si256(apart, 1));
    return out;
}

// GCC 12 else forms all products of a block before it adds them, and has to store them.
void keep_in_register(__m256i & x) {
    __asm__ volatile("" : "+x"(x));
}

// Sums of a block: 8 products of 15 times 127 and their neighbours are 30,480, which 16 bits hold.
template <int Columns>
void multiply(const panel & weights, int64_t n_blocks, const column_block * const columns[Columns], bool first,
              float * const out[Columns]) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256        sums[Columns][halves];
#pragma GCC unroll 4
    for (int c = 0; c < Columns; c++) {
#pragma GCC unroll 2
        for (int h = 0; h < halves; h++) {
            sums[c][h] = first ? _mm256_setzero_ps() : _mm256_loadu_ps(out[c] + 8 * h);
        }
    }
    for (int64_t b = 0; b < n_blocks; b++) {
        const panel_block & w = weights.blocks[b];
        __m256i             whole[Columns][halves];
#pragma GCC unroll 8
        for (int g = 0; g < groups; g++) {
#pragma GCC unroll 4
            for (int c = 0; c < Columns; c++) {
                const __m256i x = _mm256_set1_epi32(dword_at(columns[c][b].values + 4 * g));
#pragma GCC unroll 2
                for (int h = 0; h < halves; h++) {
                    const __m256i products = _mm256_maddubs_epi16(w.values[g][h], x);
                    whole[c][h]            = g == 0 ? products : _mm256_add_epi16(whole[c][h], products);
                    keep_in_register(whole[c][h]);
                }
            }
        }
#pragma GCC unroll 4
        for (int c = 0; c < Columns; c++) {
            const __m256 scale = _mm256_broadcast_ss(&columns[c][b].scale);
            const __m256 sum   = _mm256_broadcast_ss(&columns[c][b].sum);
#pragma GCC unroll 2
            for (int h = 0; h < halves; h++) {
                const __m256 x = _mm256_cvtepi32_ps(_mm256_madd_epi16(whole[c][h], ones));
                sums[c][h]     = _mm256_fmadd_ps(x, _mm256_mul_ps(w.scale[h], scale), sums[c][h]);
                sums[c][h]     = _mm256_fmadd_ps(w.least[h], sum, sums[c][h]);
            }
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < Columns; c++) {
#pragma GCC unroll 2
        for (int h = 0; h < halves; h++) {
            _mm256_storeu_ps(out[c] + 8 * h, sums[c][h]);
        }
    }
}

// A panel with up to panel_columns columns; of the last rows of a matrix there may be fewer than a panel has.
template <int Columns>
void multiply_into(const panel & weights, int64_t n_blocks, const column_block * columns, size_t column_bytes,
                   bool first, float * out, size_t out_bytes, int n_rows) {
    const column_block * in[Columns];
    float *              to[Columns];
    float                few[Columns][panel_rows];
    for (int c = 0; c < Columns; c++) {
        in[c] = reinterpret_cast<const column_block *>(reinterpret_cast<const char *>(columns) + c * column_bytes);
        float * column = reinterpret_cast<float *>(reinterpret_cast<char *>(out) + c * out_bytes);
        to[c]          = n_rows == panel_rows ? column : few[c];
        if (to[c] == few[c] && !first) {
            std::memcpy(few[c], column, n_rows * sizeof(float));
        }
    }
    multiply<Columns>(weights, n_blocks, in, first, to);
    for (int c = 0; c < Columns; c++) {
        if (to[c] == few[c]) {
            std::memcpy(reinterpret_cast<char *>(out) + c * out_bytes, few[c], n_rows * sizeof(float));
        }
    }
}

// One column, as in decoding: each block is multiplied as it is opened, with no panel between. The sums and their order
// are those of multiply().
void run_column(const weights_product & p, int64_t row_0, int n_rows) {
    const int64_t        n_blocks = p.n_elements / WEIGHTS_BLOCK;
    const column_block * column   = static_cast<const column_block *>(p.columns);
    const __m256i        ones     = _mm256_set1_epi16(1);
    const row_q4_1 *     rows[8];
    for (int r = 0; r < 8; r++) {
        const int64_t row = row_0 + (r < n_rows ? r : n_rows - 1);
        rows[r]           = reinterpret_cast<const row_q4_1 *>(static_cast<const char *>(p.rows) + row * p.row_bytes);
    }
    __m256       sums = _mm256_setzero_ps();
    const char * next = static_cast<const char *>(p.rows) + (row_0 + 8) * p.row_bytes; // fetched as these are read
    for (int64_t b = 0; b < n_blocks; b++) {
        for (size_t line = 0; line < 8 * sizeof(row_q4_1); line += 64) {
            _mm_prefetch(next + b * 8 * sizeof(row_q4_1) + line, _MM_HINT_T0);
        }
        const opened w     = open_q4_1(rows, b);
        __m256i      whole = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int g = 0; g < groups; g++) {
            const __m256i x = _mm256_set1_epi32(dword_at(column[b].values + 4 * g));
            whole           = _mm256_add_epi16(whole, _mm256_maddubs_epi16(w.values[g], x));
        }
        const __m256 scale = _mm256_broadcast_ss(&column[b].scale);
        const __m256 sum   = _mm256_broadcast_ss(&column[b].sum);
        const __m256 x     = _mm256_cvtepi32_ps(_mm256_madd_epi16(whole, ones));
        sums               = _mm256_fmadd_ps(x, _mm256_mul_ps(w.scale, scale), sums);
        sums               = _mm256_fmadd_ps(w.least, sum, sums);
    }
    float of_rows[8];
    _mm256_storeu_ps(of_rows, sums);
    std::memcpy(static_cast<float *>(p.out) + row_0, of_rows, n_rows * sizeof(float));
}

void run_panel(const weights_product & p, int64_t row_0, int n_rows) {
    const int64_t    n_blocks     = p.n_elements / WEIGHTS_BLOCK;
    const size_t     column_bytes = weights_column_bytes(p.type, p.n_elements);
    const row_q4_1 * rows[panel_rows];
    panel            weights;
    for (int r = 0; r < panel_rows; r++) {
        const int64_t row = row_0 + (r < n_rows ? r : n_rows - 1);
        rows[r]           = reinterpret_cast<const row_q4_1 *>(static_cast<const char *>(p.rows) + row * p.row_bytes);
    }
    for (int64_t b_0 = 0; b_0 < n_blocks; b_0 += panel_blocks) {
        const int64_t n = n_blocks - b_0 < panel_blocks ? n_blocks - b_0 : panel_blocks;
        for (int64_t b = 0; b < n; b++) {
            for (int h = 0; h < halves; h++) {
                const opened of = open_q4_1(rows + 8 * h, b_0 + b);
                for (int g = 0; g < groups; g++) {
                    weights.blocks[b].values[g][h] = of.values[g];
                }
                weights.blocks[b].scale[h] = of.scale;
                weights.blocks[b].least[h] = of.least;
            }
        }
        for (int64_t c = 0; c < p.n_columns; c += panel_columns) {
            const char *         at      = static_cast<const char *>(p.columns) + c * column_bytes;
            const column_block * columns = reinterpret_cast<const column_block *>(at) + b_0;
            char *               to      = reinterpret_cast<char *>(p.out) + c * p.out_bytes + row_0 * sizeof(float);
            const auto           body    = p.n_columns - c >= 4   ? multiply_into<4>
                                           : p.n_columns - c == 3 ? multiply_into<3>
                                           : p.n_columns - c == 2 ? multiply_into<2>
                                                                  : multiply_into<1>;
            body(weights, n, columns, column_bytes, b_0 == 0, reinterpret_cast<float *>(to), p.out_bytes, n_rows);
        }
    }
}

void run(const weights_product & p, int64_t row_0, int64_t row_1) {
    if (p.n_columns == 1) {
        for (int64_t r = row_0; r < row_1; r += 8) {
            run_column(p, r, int(row_1 - r < 8 ? row_1 - r : 8));
        }
        return;
    }
    for (int64_t r = row_0; r < row_1; r += panel_rows) {
        run_panel(p, r, int(row_1 - r < panel_rows ? row_1 - r : panel_rows));
    }
}

} // namespace

const weights_kernels * weights_avx2() {
    static const weights_kernels kernels = { "avx2", cpu_has_avx2, run };
    return &kernels;
}

} // namespace mixedkv
#else
namespace mixedkv {

const weights_kernels * weights_avx2() {
    return nullptr;
}

} // namespace mixedkv
#endif
