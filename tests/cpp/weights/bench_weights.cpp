// Times products with weights on one thread, the best of many rounds.
//
//     bench_weights ISA TYPE N_ELEMENTS N_ROWS N_COLUMNS

#include "support.h"

#include "check.h"

#include <algorithm>
#include <chrono>

namespace {

void time(const mixedkv::weights_kernels & body, const weights_product & product, void * work) {
    using clock = std::chrono::steady_clock;
    double best = 1e9;
    for (const clock::time_point end = clock::now() + std::chrono::seconds(1); clock::now() < end;) {
        const clock::time_point start = clock::now();
        body.run(product, work, 0, product.n_rows);
        best = std::min(best, std::chrono::duration<double>(clock::now() - start).count());
    }
    const double n_row_elements = double(product.n_elements) * double(product.n_rows);
    std::printf("%.3f ms, %.1f G products/s, %.1f GB/s of rows\n", best * 1e3,
                n_row_elements * double(product.n_columns) / best / 1e9,
                double(product.row_bytes) * double(product.n_rows) / best / 1e9);
}

} // namespace

int main(int argc, char ** argv) {
    CHECK(argc == 6);
    const std::string                name   = argv[2];
    const bool                       is_f16 = name == "f16" || name == "bf16";
    const mixedkv::weights_kernels * body   = is_f16 ? mixedkv::find_weights(argv[1], true) : test::find_body(argv[1]);
    CHECK(body);
    const int64_t      n_elements = std::stoll(argv[3]), n_rows = std::stoll(argv[4]), n_columns = std::stoll(argv[5]);
    std::vector<float> out(n_rows * n_columns);
    if (is_f16) {
        const test::f16_problem p(name == "f16" ? WEIGHTS_F16 : WEIGHTS_BF16, n_elements, n_rows, n_columns);
        const auto              columns = p.packed(*body, 0, n_columns);
        time(*body, p.product(columns.get(), n_columns, out.data()),
             test::lines(body->work_bytes(n_elements, 0)).get());
        return 0;
    }
    const auto * of = std::find_if(std::begin(test::types), std::end(test::types),
                                   [&](const test::named_type & type) { return type.name == name; });
    CHECK(of != std::end(test::types));
    const test::problem p(of->type, n_elements, n_rows, n_columns);
    const auto          columns = p.packed(*body, 0, n_columns);
    time(*body, p.product(columns.get(), n_columns, out.data(), nullptr),
         test::lines(body->work_bytes(n_elements, 0)).get());
}
