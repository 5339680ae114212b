#include "rows/convert.h"

#include "attention/least_error.h"
#include "attention/simd/rotation.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

bool llama_kv_row_is_readable(ggml_type type) {
    return uint32_t(type) < GGML_TYPE_COUNT && ggml_blck_size(type) > 0 &&
        (type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float);
}

bool llama_kv_row_is_writable(ggml_type type) {
    return llama_kv_row_is_readable(type) && llama_kv_row_writer(type) &&
        (type == GGML_TYPE_F32 || ggml_get_type_traits(type)->from_float_ref);
}

// bits of the exponent are all 1 in infinities and NaN
template <typename T> static bool has_no_exponent(const T * x, int64_t n, T exponent) {
    int64_t n_found = 0;
    for (int64_t i = 0; i < n; ++i) {
        n_found += (x[i] & exponent) == exponent;
    }
    return n_found == 0;
}

bool llama_kv_row_is_finite(ggml_type type, const void * data, int64_t n) {
    switch (type) {
        case GGML_TYPE_F32:  return has_no_exponent<uint32_t>((const uint32_t *) data, n, 0x7f800000);
        case GGML_TYPE_F16:  return has_no_exponent<uint16_t>((const uint16_t *) data, n, 0x7c00);
        case GGML_TYPE_BF16: return has_no_exponent<uint16_t>((const uint16_t *) data, n, 0x7f80);
        default:             break;
    }

    const int64_t      n_part = 64*ggml_blck_size(type);
    std::vector<float> part(n_part);

    for (int64_t i = 0; i < n; i += n_part) {
        const int64_t n_here = std::min(n_part, n - i);
        ggml_get_type_traits(type)->to_float((const uint8_t *) data + ggml_row_size(type, i), part.data(), n_here);
        if (!llama_kv_row_is_finite(GGML_TYPE_F32, part.data(), n_here)) {
            return false;
        }
    }

    return true;
}

ggml_from_float_t llama_kv_row_writer(ggml_type type) {
    static const auto traits = [] {
        ggml_backend_dev_t device  = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        void *             address = device ? ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device),
                                                                                "ggml_get_type_traits_cpu") : nullptr;
        if (!address) {
            throw std::runtime_error("no CPU backend is loaded: call ggml_backend_load_all_from_path with the folder of libllama");
        }
        return reinterpret_cast<decltype(ggml_get_type_traits_cpu) *>(address);
    }();
    return traits(type)->from_float;
}

ggml_from_float_t llama_kv_row_writer_of_least_error(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_0: return mixedkv::q4_0_from_float;
        case GGML_TYPE_Q5_0: return mixedkv::q5_0_from_float;
        default:             return llama_kv_row_writer(type);
    }
}

void llama_kv_rows_rotate(float * x, int64_t n_total, int64_t n) {
    const float scale = 1.0f/sqrtf(n);

    for (float * block = x; block < x + n_total; block += n) {
        for (int64_t h = 1; h < n; h *= 2) {
            switch (h) { // compilers make vectors of the steps of a small h if they know it
                case 1:  mixedkv::butterflies(block, n, 1); break;
                case 2:  mixedkv::butterflies(block, n, 2); break;
                case 4:  mixedkv::butterflies(block, n, 4); break;
                default: mixedkv::butterflies(block, n, h); break;
            }
        }
        for (int64_t i = 0; i < n; ++i) {
            block[i] *= scale;
        }
    }
}

llama_kv_row_converter::llama_kv_row_converter(
        const llama_kv_row_layer & layer, llama_kv_row_format src, llama_kv_row_format dst, int64_t n_embd) :
    src(src), dst(dst), n_embd(n_embd), n_embd_head(layer.model.hparams.n_embd_head_k(layer.il)), row(n_embd) {
    if (src.has_subtracted_bias()) {
        src_rope.emplace(layer.model, layer.cparams, layer.il, src.scales->pairs);
    }
    if (dst.has_subtracted_bias()) {
        dst_rope.emplace(layer.model, layer.cparams, layer.il, dst.scales->pairs);
    }
}

void llama_kv_rows_scale(float * x, const std::vector<float> & scale) {
    for (size_t i = 0; i < scale.size(); ++i) {
        x[i] *= scale[i];
    }
}

void llama_kv_row_converter::change_basis(llama_pos pos) {
    const bool rescale = src.scales_id() != dst.scales_id() || src.has_subtracted_bias() != dst.has_subtracted_bias();

    if (src.rotation == dst.rotation && !rescale) {
        return;
    }
    if (src.rotation) {
        llama_kv_rows_rotate(row.data(), n_embd, src.rotation);
    }
    if (rescale && src.scales) {
        llama_kv_rows_scale(row.data(), src.scales->q);
    }
    if (rescale && src_rope) {
        llama_kv_subtract_bias(row.data(), n_embd_head, *src.scales, src_rope->at(pos), -1.0f);
    }
    if (rescale && dst_rope) {
        llama_kv_subtract_bias(row.data(), n_embd_head, *dst.scales, dst_rope->at(pos));
    }
    if (rescale && dst.scales) {
        llama_kv_rows_scale(row.data(), dst.scales->k);
    }
    if (dst.rotation) {
        llama_kv_rows_rotate(row.data(), n_embd, dst.rotation);
    }
}

void llama_kv_row_converter::convert(const void * from, void * to, const llama_pos * pos, int64_t n_rows) {
    if (is_copy()) {
        memcpy(to, from, n_rows*src_size());
        return;
    }

    const auto to_float   = ggml_get_type_traits(src.type)->to_float;
    const auto from_float = ggml_get_type_traits(dst.type)->from_float_ref;

    for (int64_t i = 0; i < n_rows; ++i) {
        const auto * from_row = (const uint8_t *) from + i*src_size();
        auto *       to_row   = (uint8_t *) to + i*dst_size();

        if (src.type == GGML_TYPE_F32) {
            memcpy(row.data(), from_row, src_size());
        } else {
            to_float(from_row, row.data(), n_embd);
        }

        change_basis(pos[i]);

        if (dst.type == GGML_TYPE_F32) {
            memcpy(to_row, row.data(), dst_size());
        } else {
            from_float(row.data(), to_row, n_embd);
        }
    }
}
