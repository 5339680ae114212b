#include "kernel.h"

namespace mixedkv {

const attention_kernels * attention_amx() {
    return nullptr;
}

} // namespace mixedkv
