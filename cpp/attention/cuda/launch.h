// How a layer's attention is cut into blocks, and which kernels run. The same on a GPU and for tests: `Device`
// launches.
//
//   device.launch(grid_size, threads, bytes of shared memory, kernel, arguments ...)

#pragma once

#include "convert.h"
#include "decode.h"
#include "merge.h"
#include "prefill.h"

#include <cstddef>

namespace mixedkv {
namespace cuda {

// What a device can run at a time
struct device_size {
    int n_processors      = 1;
    int blocks_of_decode  = 2; // of a processor
    int blocks_of_prefill = 2;
};

// Rows that share a KV head up to which each tile of them reads the keys by itself
constexpr int decode_rows = 64;

inline bool is_decode(const attention_problem & p) {
    return p.n_tokens * p.group() <= decode_rows;
}

inline int round_up(int n, int m) {
    return (n + m - 1) / m * m;
}

// Fills in the splits: as many as keep the device busy. prefill_rows: of a block of the shape that runs
inline void plan_splits(attention_problem & p, const device_size & size, int prefill_rows) {
    const bool decode    = is_decode(p);
    const int  rows      = decode ? 8 : prefill_rows;
    const int  n_tiles   = (p.n_tokens * p.group() + rows - 1) / rows;
    const int  n_blocks  = p.n_head_kv * n_tiles * p.n_stream;
    const int  at_a_time = size.n_processors * (decode ? size.blocks_of_decode : size.blocks_of_prefill);
    const int  unit      = decode ? decode_warps * 32 : 256; // of keys: fewer are not worth a block

    int n = at_a_time / n_blocks;
    n     = n < 1 ? 1 : n;

    p.split_keys = round_up(p.cold.n / n + 1, unit);
    p.hot_keys   = decode ? decode_warps * 16 : round_up(p.n_hot() / n + 1, unit); // few, in F16: a strip for each warp
    p.n_cold_splits = (p.cold.n + p.split_keys - 1) / p.split_keys;
    p.n_splits      = p.n_cold_splits + (p.n_hot() + p.hot_keys - 1) / p.hot_keys;
}

// Floats of sums and weights that the plan takes, d: elements of V
inline size_t sums_floats(const attention_problem & p, int d) {
    return size_t(p.n_stream) * p.n_tokens * p.n_head * p.n_splits * d;
}

inline size_t weights_floats(const attention_problem & p) {
    return size_t(p.n_stream) * p.n_tokens * p.n_head * p.n_splits * 2;
}

template <class Device, class K, class V, int d>
void run_decode(Device & device, const attention_problem & p) {
    const int n_tiles = (p.n_tokens * p.group() + 7) / 8;
    device.launch({ p.n_head_kv * n_tiles, p.n_splits, p.n_stream }, decode_warps * warp_size,
                  decode_layout<K, V, d, d, 1>::bytes, decode_kernel<K, V, d, d, 1>, p);
}

template <class Device, int d, class Shape = usual_prefill<d>>
void run_prefill(Device & device, const attention_problem & p, stored_type k, stored_type v) {
    using layout       = prefill_layout<d, Shape>;
    const int n_blocks = (p.n_tokens * p.group() + Shape::rows - 1) / Shape::rows;
    device.launch({ p.n_head_kv * n_blocks, p.n_splits, p.n_stream }, layout::threads, layout::bytes(p.group()),
                  prefill_kernel<d, Shape>, p, k, v);
}

template <class Device, int d>
void run_merge(Device & device, const attention_problem & p) {
    const int n_rows = p.n_stream * p.n_tokens * p.n_head, n_tokens = p.ring_rows ? p.n_stream * p.n_tokens : 0;
    if (p.n_splits > merge_warps) {
        device.launch({ n_rows + n_tokens, 1, 1 }, merge_warps * warp_size, merge_bytes(d), merge_kernel<d, 1>, p);
    } else {
        device.launch({ (n_rows + merge_warps - 1) / merge_warps + n_tokens, 1, 1 }, merge_warps * warp_size, size_t(0),
                      merge_kernel<d, merge_warps>, p);
    }
}

template <class Device, int d, class Shape = usual_prefill<d>>
void run_attention(Device & device, const attention_problem & p, stored_type k, stored_type v) {
    if (is_decode(p)) {
        with_rows<d>(k, [&](auto rows_k) {
            with_rows<d>(v, [&](auto rows_v) { run_decode<Device, decltype(rows_k), decltype(rows_v), d>(device, p); });
        });
    } else {
        run_prefill<Device, d, Shape>(device, p, k, v);
    }
    run_merge<Device, d>(device, p);
}

template <class Device, int d>
void run_store(Device & device, const store_problem & p, stored_type k, stored_type v) {
    device.launch({ p.n_tokens, (2 * p.n_head_kv + store_warps - 1) / store_warps, 1 }, store_warps * warp_size,
                  size_t(0), store_kernel<d>, p, k, v);
}

template <class Device>
void run_get(Device & device, const convert_problem & p, stored_type type) {
    device.launch({ p.n_rows, (p.n_elements + convert_threads - 1) / convert_threads, p.n_stream }, convert_threads,
                  size_t(0), get_kernel<0>, p, type);
}

template <class Device>
void run_set(Device & device, const convert_problem & p, stored_type type) {
    device.launch({ p.n_rows, (p.n_elements / 64 + store_warps - 1) / store_warps, 1 }, store_warps * warp_size,
                  size_t(0), set_kernel<0>, p, type);
}

} // namespace cuda
} // namespace mixedkv
