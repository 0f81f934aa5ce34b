"""The ops of namespace `fxfuse`: importing this module defines them all.

Attributes that they share: `eps` (None: the machine epsilon), `weight_offset` (1 for a zero-centred
weight), and where the graph rounds: `compute_dtype` of the statistics, `rstd_dtype` of the root
before it scales, `scale_dtype` of the root times the weight, `unit_dtype` of the normalised value
before the weight, `out_dtype` and the others, each "" (what promotion gives), "input" (the dtype of
x, or of x + residual), "gate" (the dtype of the gate) or the name of a torch dtype. Outputs lie in
memory as an elementwise op on the inputs would put them, or contiguously where `contiguous` says
that the norm did. `forward` and `backward` are explained in `registration`.
"""

from fxfuse.kernels import gate_ops, norm_ops, sandwich_ops

__all__ = ["gate_ops", "norm_ops", "sandwich_ops"]
