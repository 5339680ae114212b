// NEON without dot products: 8 rows by 4 columns. Products of bytes are added in 16 bits as long as they fit.

#include "bodies.h"

#include "lanes_neon.h"

namespace mixedkv {

bool cpu_has_neon(); // attention/cpu.cpp

namespace {

struct plain : neon {
    // So many products of a value and 127 are added in 16 bits: values of 15 (31, 63, 128) come to 15,240 (31,496,
    // 32,004, 32,512).
    template <class Row>
    struct sum {
        static constexpr int bits     = traits<Row>.bits;
        static constexpr int together = bits <= 5 ? 8 : bits == 6 ? 4 : 2;

        int16x8_t low, high; // of two rows each
        int32x4_t whole;

        void begin(int32_t start) { whole = vdupq_n_s32(bits == 8 ? 0 : start); }

        void add(int group, ints values, int32_t elements) {
            const int8x16_t w = signed_bytes(values), x = vreinterpretq_s8_s32(vdupq_n_s32(elements));
            if (group % together == 0) {
                low  = vmull_s8(vget_low_s8(w), vget_low_s8(x));
                high = vmull_high_s8(w, x);
            } else {
                low  = vmlal_s8(low, vget_low_s8(w), vget_low_s8(x));
                high = vmlal_high_s8(high, w, x);
            }
            if (group % together == together - 1) {
                whole = bits == 4 ? vpadalq_s16(whole, vpaddq_s16(low, high))
                                  : vaddq_s32(whole, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
            }
        }

        ints end() const { return ints(whole); }
    };
};

} // namespace

const weights_kernels * weights_neon() {
    static const weights_kernels kernels = { "neon",         false,          1,
                                             cpu_has_neon,   no_work_bytes,  quantised_bytes,
                                             pack_quantised, run_body<plain> };
    return &kernels;
}

} // namespace mixedkv
