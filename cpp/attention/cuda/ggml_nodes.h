// Included by ggml-cuda.cu (vendor/patches/22-cuda-attention.patch): custom nodes that ggml-cuda computes, and rows of
// lm4 and tc3 that its own nodes get and set. ROCm and MUSA compile that file too, and have none.

#pragma once

struct ggml_tensor;
struct ggml_backend_cuda_context;

#if defined(GGML_USE_HIP) || defined(GGML_USE_MUSA)
inline bool mixedkv_cuda_supports(int, const ggml_tensor *) {
    return false;
}

inline bool mixedkv_cuda_compute(ggml_backend_cuda_context &, ggml_tensor *) {
    return false;
}
#else
// Whether the device computes this node by kernels of this folder: called by supports_op.
bool mixedkv_cuda_supports(int device, const ggml_tensor * node);

// Computes such a node; false: it is none. Called by ggml_cuda_compute_forward.
bool mixedkv_cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node);
#endif
