#include "emulated_body.h"

#include "attention/attention_dotprod.cpp"

bool mixedkv::emulated_arm() {
    return true;
}
