// A product with weights by this package's kernels or by ggml's, on one thread, for counts.py. Those of ggml get rows
// as it repacks them for the processor that it is compiled for.
//
//   product_once ours|ggml TYPE COLUMNS REPEATS
//
// Prints whose it is and a few numbers of the output, which are near those of the other one.

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "noise.h"
#include "weights/weights.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr int64_t n_elements = 2048, n_rows = 1024, n_different_rows = 8;

std::vector<char> random_rows(ggml_type type) {
    const size_t       bytes = ggml_row_size(type, n_elements);
    std::vector<float> values(n_elements);
    std::vector<char>  out(n_rows * bytes);
    uint32_t           seed = 1;
    for (int64_t r = 0; r < n_rows; r++) {
        if (r >= n_different_rows) {
            std::memcpy(out.data() + r * bytes, out.data() + r % n_different_rows * bytes, bytes);
            continue;
        }
        for (float & x : values) {
            x = noise(seed);
        }
        ggml_quantize_chunk(type, values.data(), out.data() + r * bytes, 0, 1, n_elements, nullptr);
    }
    return out;
}

void print(const char * kernels, const float * out, int64_t n_columns) {
    std::printf("%s", kernels);
    for (int64_t i = 0; i < 4; i++) {
        std::printf(" %.4f", double(out[n_columns / 2 * n_rows + 2 * i + 1]));
    }
    std::printf("\n");
}

void run_ours(ggml_type type, const std::vector<char> & rows, const std::vector<float> & x, int64_t n_columns,
              int repeats) {
    std::vector<float> out(n_columns * n_rows);
    weights_columns    columns = { type,      false,   n_elements,
                                   n_columns, nullptr, ggml_get_type_traits_cpu(GGML_TYPE_Q8_0)->from_float };
    columns.packed             = std::aligned_alloc(WEIGHTS_ALIGNMENT, GGML_PAD(weights_columns_bytes(&columns), 64));
    weights_product product    = {};
    product.type               = type;
    product.n_elements         = n_elements;
    product.n_rows             = n_rows;
    product.n_columns          = n_columns;
    product.rows               = rows.data();
    product.row_bytes          = ggml_row_size(type, n_elements);
    product.columns            = columns.packed;
    product.out                = out.data();
    product.out_bytes          = n_rows * sizeof(float);
    for (int i = 0; i < repeats; i++) {
        for (int64_t c = 0; c < n_columns; c++) {
            weights_pack(&columns, x.data() + c * n_elements, c, 0, n_elements / WEIGHTS_BLOCK);
        }
        weights_run(&product, nullptr, 0, n_rows);
    }
    print(weights_isa(), out.data(), n_columns);
}

// Where llama.cpp lays rows out for the processor
ggml_backend_buffer_type_t repacking() {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    void *             find =
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), "ggml_backend_dev_get_extra_bufts");
    return reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(find)(cpu)[0];
}

void run_ggml(ggml_type type, const std::vector<char> & rows, const std::vector<float> & x, int64_t n_columns,
              int repeats) {
    ggml_context * of_rows = ggml_init({ 4 * ggml_tensor_overhead(), nullptr, true });
    ggml_tensor *  w       = ggml_new_tensor_2d(of_rows, type, n_elements, n_rows);
    ggml_backend_alloc_ctx_tensors_from_buft(of_rows, repacking());
    const bool is_repacked = w->extra != nullptr;
    if (!is_repacked) {
        w->buffer = nullptr;
        w->data   = const_cast<char *>(rows.data());
    } else {
        ggml_backend_tensor_set(w, rows.data(), 0, rows.size());
    }
    const size_t   bytes = 16 * (x.size() + n_columns * n_rows) + (size_t(64) << 20);
    ggml_context * ctx   = ggml_init({ bytes, nullptr, false });
    ggml_tensor *  b     = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_elements, n_columns);
    std::memcpy(b->data, x.data(), x.size() * sizeof(float));
    ggml_tensor * res   = ggml_mul_mat(ctx, w, b);
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, res);
    for (int i = 0; i < repeats; i++) {
        ggml_graph_compute_with_ctx(ctx, graph, 1);
    }
    print(is_repacked ? "repacked" : "ggml", static_cast<const float *>(res->data), n_columns);
}

} // namespace

int main(int argc, char ** argv) {
    const std::string whose = argc > 1 ? argv[1] : "", name = argc > 2 ? argv[2] : "";
    int               type = 0;
    while (type < GGML_TYPE_COUNT && name != ggml_type_name(ggml_type(type))) {
        type++;
    }
    if (argc != 5 || (whose != "ours" && whose != "ggml") || type == GGML_TYPE_COUNT ||
        !ggml_is_quantized(ggml_type(type))) {
        std::fprintf(stderr, "usage: product_once ours|ggml TYPE COLUMNS REPEATS, a quantised type as q4_K\n");
        return 2;
    }
    const int64_t      n_columns = std::atoll(argv[3]);
    std::vector<float> x(n_columns * n_elements);
    uint32_t           seed = 2;
    for (float & e : x) {
        e = noise(seed);
    }
    const auto run = whose == "ours" ? run_ours : run_ggml;
    run(ggml_type(type), random_rows(ggml_type(type)), x, n_columns, std::atoi(argv[4]));
}
