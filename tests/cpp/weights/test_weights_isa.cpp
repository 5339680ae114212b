// Which body makes products with quantised rows, and what follows for how rows lie in memory.
//
//     test_weights_isa [ISA]    what it must be

#include "weights/weights.h"

#include "check.h"

#include <cstdio>
#include <cstdlib>
#include <string>

int main(int argc, char ** argv) {
    const std::string isa = weights_isa();
    std::printf("products with weights: %s\n", isa.c_str());
    CHECK(argc == 1 || isa == argv[1]);

    const char * const given    = std::getenv("MIXEDKV_WEIGHTS");
    const std::string  weights  = given ? given : "";
    const bool         is_known = weights.empty() || weights == "llama.cpp";
    const bool         is_bf16  = weights == "bf16" && !weights_error();
    CHECK(weights == "bf16" || is_known == !weights_error());
    if (weights_error()) {
        std::printf("%s\n", weights_error());
        CHECK(std::string(weights_error()).find("MIXEDKV_WEIGHTS=") == 0);
        CHECK(std::string(weights_error()).find(weights) != std::string::npos);
    }

    const bool is_ours = isa != "llama.cpp", reads_repacked = weights_repacked(WEIGHTS_Q4_K) >= 0;
    for (const int type : { WEIGHTS_Q4_0, WEIGHTS_Q8_0, WEIGHTS_Q4_K, WEIGHTS_Q6_K }) {
        CHECK(weights_supported(type, 1) == is_ours && weights_supported(type, 512) == is_ours);
        CHECK(weights_same_bits(type) == (is_ours && !is_bf16));
        CHECK(weights_packed_alike(type, type == WEIGHTS_Q6_K ? WEIGHTS_Q4_1 : type, 512) || !is_bf16);
        CHECK(weights_keep_layout(type) == (is_ours && !reads_repacked));
    }
    CHECK(weights_same_bits(weights_repacked(WEIGHTS_Q4_K)) == (is_ours && reads_repacked && !is_bf16));
    CHECK(!weights_keep_layout(10)); // Q2_K, which llama.cpp multiplies
}
