// MIXEDKV_ISA: a name that cannot be used is reported with the variable, the value and what is available.

#include "attention/attention.h"

#include "../environment.h"

#include <cstdio>
#include <string>

static bool contains(const char * text, const char * part) {
    if (std::string(text).find(part) != std::string::npos) {
        return true;
    }
    std::printf("FAIL \"%s\" does not name \"%s\"\n", text, part);
    return false;
}

int main(int argc, char ** argv) {
    const std::string name = argc > 1 ? argv[1] : "";
    test::set_variable("MIXEDKV_ISA", name.c_str());
    const char * error = mixedkv::attention_isa_error();
    if (name.empty() || name == "scalar") {
        const bool ok = !error && (name.empty() || name == mixedkv::attention_isa());
        std::printf("%s: %s\n", name.c_str(), error ? error : mixedkv::attention_isa());
        return !ok;
    }
    if (!error) {
        std::printf("FAIL %s was accepted\n", name.c_str());
        return 1;
    }
    return !(contains(error, "MIXEDKV_ISA") && contains(error, name.c_str()) && contains(error, "scalar"));
}
