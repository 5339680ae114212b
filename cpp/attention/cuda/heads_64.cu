// The kernels for heads of 64 elements: a file of its own, since they take a while to compile.

#include "cuda_device.h"
#include "launch.h"

template void mixedkv::cuda::run_attention<mixedkv::cuda::cuda_device, 64>(cuda_device &, const attention_problem &,
                                                                           stored_type, stored_type);
template void mixedkv::cuda::run_store<mixedkv::cuda::cuda_device, 64>(cuda_device &, const store_problem &,
                                                                       stored_type, stored_type);
