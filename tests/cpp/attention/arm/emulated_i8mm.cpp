#include "emulated_body.h"

#include "attention/attention_i8mm.cpp"

bool mixedkv::emulated_arm_i8mm() {
    return true;
}
