// Both the rule as it is and the example of docs/extending.md keep the contract; a rule that does not is found.

#include "example_layer_sinks.h"
#include "rule_contract.h"

#include <string>

using mixedkv::hot_window;
using mixedkv::layer_sinks;

static void the_rule_keeps_the_contract() {
    for (const hot_window & window :
         { hot_window{ 32, 16, 4 }, hot_window{ 16, 1, 0 }, hot_window{ 0, 1, 3 }, hot_window{ 24, 8, 2, 5 } }) {
        mixedkv::keeps_the_contract(window, window, 120);
    }
}

static void sinks_by_layer_keep_it_too() {
    for (const hot_window & window : { hot_window{ 32, 16, 0 }, hot_window{ 0, 1, 0 }, hot_window{ 24, 8, 0, 5 } }) {
        const layer_sinks rule(window, { 0, 1, 4, 4, 2 });
        CHECK(rule.problem().empty());
        CHECK(rule.held().sink_tokens == 4);
        for (uint32_t il = 0; il < 5; il++) {
            mixedkv::keeps_the_contract(rule.held(), rule.of(il), 120);
        }
    }
}

static void layers_read_their_own_sinks() {
    const layer_sinks rule({ 32, 16, 0 }, { 0, 1, 4 });
    const int32_t     q = 1000;
    for (uint32_t il = 0; il < 3; il++) {
        const hot_window of = rule.of(il);
        int32_t          n  = 0;
        for (int32_t p = 0; p < of.begin(q); p++) {
            n += of.contains(p, of.begin(q));
        }
        CHECK(n == int32_t(of.sink_tokens));
    }
    CHECK(rule.of(1).contains(0, rule.of(1).begin(q)) && !rule.of(1).contains(1, rule.of(1).begin(q)));
    CHECK(rule.unread_rows() == 4 + 3 + 0);
}

static void no_layers_are_a_problem() {
    CHECK(layer_sinks({ 32, 16, 0 }, {}).problem().find("each layer") != std::string::npos);
    CHECK(layer_sinks({ 8, 16, 0 }, { 1 }).problem().find("quantization_threshold 8") != std::string::npos);
}

// Ends the test: the layer reads more sinks, or a wider window, than the sequence holds.
static void breaks_the_contract(const std::string & how) {
    const hot_window held = { 32, 16, 2 }, more_sinks = { 32, 16, 4 }, wider = { 64, 16, 2 };
    if (how == "more_sinks") {
        mixedkv::reads_what_is_held(held, more_sinks, 120);
    } else if (how == "wider") {
        mixedkv::reads_what_is_held(held, wider, 120);
    } else if (how == "cut") {
        mixedkv::cuts_tell_the_truth(held, wider, 120);
    }
}

int main(int argc, char ** argv) {
    if (argc > 1) {
        breaks_the_contract(argv[1]);
        return 0;
    }
    the_rule_keeps_the_contract();
    sinks_by_layer_keep_it_too();
    layers_read_their_own_sinks();
    no_layers_are_a_problem();
}
