// The kernels for heads of HEAD_SIZE elements: compiled for each size by itself, since they take a while.

#include "cuda_timer.h"
#include "kernel_times.h"

#define TIMES_OF_HEAD_(d) times_of_heads_##d
#define TIMES_OF_HEAD(d)  TIMES_OF_HEAD_(d)

int TIMES_OF_HEAD(HEAD_SIZE)(mixedkv::cuda::cuda_timer & device, const mixedkv::cuda::times_options & options) {
    return mixedkv::cuda::head_times<mixedkv::cuda::cuda_timer, HEAD_SIZE>(device, options).run();
}
