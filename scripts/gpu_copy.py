"""A Triton kernel that reads and writes as many tensors as another one, and does nothing else."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(
    source, target, size, READS: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr
):
    """Each of `target` [WRITES, size] becomes the sum of `source` [READS, size].

    size is a multiple of BLOCK; one program takes one BLOCK of columns.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(READS):
        total += tl.load(source + i * size + place).to(tl.float32)
    for i in tl.static_range(WRITES):
        tl.store(target + i * size + place, total.to(target.dtype.element_ty))
