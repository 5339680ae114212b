// The bodies for ARM on another processor, by SIMDe.

#include "../attention/arm/emulated_body.h"

#include "weights/weights_dotprod.cpp"
#include "weights/weights_i8mm.cpp"
#include "weights/weights_neon.cpp"

bool mixedkv::emulated_neon() {
    return true;
}

bool mixedkv::emulated_arm() {
    return true;
}

bool mixedkv::emulated_arm_i8mm() {
    return true;
}
