"""What one GPU shows in eight minutes: `python -m benchmarks.gpu_short --out DIR`.

    a   fused AdamW by the size of a bucket, and by the tensors of a call
    b   a step at world size 1: the plain loop twice, DDP, FSDP2, stages 0 to 3
    c   a step as the last of 8 ranks, whose peers answer at once: the host's time, kernels, the device's time
    d   tests of bits: ranks that share the GPU over NCCL
    e   the peak of memory, and what the caching allocator reserves for it

`__main__` starts a worker, gives each section its seconds and writes the page; `worker` runs the sections
(`one_rank`, `many_ranks`) and writes what each has found.
"""
