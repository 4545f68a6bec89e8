#include "gpu.h"
#include "message.h"

int gpu_open(struct gpu **gpu)
{
    *gpu = NULL;
    return fail("this command was built without CUDA");
}

void gpu_close(struct gpu *gpu)
{
    if (gpu) gpu->calls->close(gpu);
}
