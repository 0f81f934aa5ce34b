"""A Triton kernel that reads and writes as many tensors as another one, and does nothing else."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(
    source, target, size, READS: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr
):
    """Each of `target` [WRITES, size] becomes the sum of `source` [READS, size].

    size is a multiple of BLOCK; one program takes one BLOCK of columns. Without writes, target
    [programs] gets one sum of each program, or the compiler would drop the reads.
    """
    program = tl.program_id(0).to(tl.int64)
    place = program * BLOCK + tl.arange(0, BLOCK)
    stride = tl.cast(size, tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(READS):
        total += tl.load(source + i * stride + place, eviction_policy="evict_first").to(tl.float32)
    for i in tl.static_range(WRITES):
        tl.store(target + i * stride + place, total.to(target.dtype.element_ty))
    if WRITES == 0:
        tl.store(target + program, tl.sum(total, axis=0).to(target.dtype.element_ty))
