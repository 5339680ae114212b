// Times products with weights on one thread, the best of many rounds.
//
//     bench_weights ISA TYPE N_ELEMENTS N_ROWS N_COLUMNS

#include "support.h"

#include "check.h"

#include <algorithm>
#include <chrono>

int main(int argc, char ** argv) {
    CHECK(argc == 6);
    const mixedkv::weights_kernels * body = test::find_body(argv[1]);
    CHECK(body);
    const auto * of = std::find_if(std::begin(test::types), std::end(test::types),
                                   [&](const test::named_type & type) { return type.name == std::string(argv[2]); });
    CHECK(of != std::end(test::types));
    const test::problem   p(of->type, std::stoll(argv[3]), std::stoll(argv[4]), std::stoll(argv[5]));
    const auto            columns = p.packed();
    std::vector<float>    out(p.n_rows * p.n_columns);
    const weights_product product = { p.type,         p.n_elements,  p.n_rows,
                                      p.n_columns,    p.rows.data(), p.row_bytes,
                                      columns.data(), out.data(),    p.n_rows * sizeof(float) };
    using clock                   = std::chrono::steady_clock;
    double best                   = 1e9;
    for (const clock::time_point end = clock::now() + std::chrono::seconds(1); clock::now() < end;) {
        const clock::time_point start = clock::now();
        body->run(product, 0, p.n_rows);
        best = std::min(best, std::chrono::duration<double>(clock::now() - start).count());
    }
    std::printf("%.3f ms, %.1f G products/s, %.1f GB/s of rows\n", best * 1e3,
                double(p.n_elements) * double(p.n_rows * p.n_columns) / best / 1e9, double(p.rows.size()) / best / 1e9);
}
