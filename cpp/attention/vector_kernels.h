// What the bodies with a vector layer L have alike

#pragma once

#include "kernel.h"
#include "sparse/page_choice.h"
#include "sparse/sketcher.h"

namespace mixedkv {
namespace {

template <class L>
constexpr attention_kernels kernels_of(const char * name, bool (*supported)(), bool same_bits,
                                       void (*run)(const attention_item &),
                                       const least_error_writers * (*least_error)() = least_error_any) {
    return { name,        supported,           same_bits,       run, sums_of<L>::merge, rotate,
             least_error, page_choice<L>::run, sketcher<L>::run };
}

} // namespace
} // namespace mixedkv
