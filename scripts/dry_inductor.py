"""What Inductor would launch on an NVIDIA GPU, found out on a machine without one.

    with dry_inductor.on_gpu(90) as graphs:
        y = torch.compile(model)(x)  # tensors on the CPU, their values never read
        torch.autograd.grad(y, (x, *model.parameters()), torch.empty_like(y))
    for graph in graphs:
        print(graph.kernels, graph.ops, graph.others)

Dynamo, autograd and the partitioner see the CPU tensors that they are given. Then each graph is
moved to fake CUDA tensors, Inductor optimises it and writes its code for the GPU, and is stopped
where it would load that code; what it hands back returns uninitialised CPU tensors of the right
strides, so that the backward graph is compiled too. What chooses by device before Inductor sees the
graph chooses for a CPU: attention is the CPU's flash kernel, of the same operands and layouts.

All private PyTorch interfaces of this tool live here, patched only inside the `with`. They also
leave traces in PyTorch's caches, so use a process of its own.
Tried on torch 2.11.0 with Triton 3.6 and on torch 2.13.0 with Triton 3.9.
"""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor, fx
from torch._dynamo import device_interface
from torch._guards import TracingContext, detect_fake_mode
from torch._inductor import compile_fx, config, graph as inductor_graph
from torch._inductor.output_code import OutputCode

GPU = torch.device("cuda", 0)
# Published multiprocessors of the A100, H100 and B200, from which Inductor chooses its splits.
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}
_PROPERTIES = dict(
    warp_size=32, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
    max_threads_per_block=1024, shared_memory_per_block=48 << 10, L2_cache_size=50 << 20,
    shared_memory_per_block_optin=227 << 10, shared_memory_per_multiprocessor=228 << 10,
    total_memory=80 << 30, name="a GPU that is not there", gcnArchName="",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One launch or call, and the bytes of what it reads and writes, each tensor once."""

    name: str
    nbytes: int


@dataclass
class Graph:
    """One compiled graph: Inductor's Triton kernels, the ops of one namespace, and other calls.

    Of the kernels it is Inductor's own count of bytes; of the other calls only names are known.
    """

    backward: bool
    kernels: list[Call]
    ops: list[Call]
    others: list[str]
    code: str = field(repr=False)


@contextlib.contextmanager
def on_gpu(arch: int, namespace: str = "fxfuse") -> Iterator[list[Graph]]:
    """The graphs that Inductor is given inside the `with`, in the order of their compilation.

    arch: 80, 90 or 100. namespace: of the ops to list in `Graph.ops`. Sizes have to be static.
    """
    graphs: list[Graph] = []
    inductor = compile_fx._InProcessFxCompile.codegen_and_compile

    def dry(self, gm, example_inputs, inputs_to_check, graph_kwargs):
        inputs = _move(gm, example_inputs)
        try:
            with _pretended(arch):
                inductor(self, gm, inputs, inputs_to_check, graph_kwargs)
        except _Written as written:
            backward = bool(graph_kwargs.get("is_backward"))
            graphs.append(_read(gm, written.code, namespace, backward))
            return _StandIn(list(_results(gm, written.lowering)))
        raise RuntimeError("Inductor did not stop: this PyTorch loads its code somewhere else")

    with (
        config.patch(force_disable_caches=True, compile_threads=1, benchmark_kernel=True),
        mock.patch.object(compile_fx._InProcessFxCompile, "codegen_and_compile", dry),
        mock.patch.object(inductor_graph.GraphLowering, "compile_to_module", _stop),
    ):
        yield graphs


# ------------------------------------------------------------ a GPU that is not there


@contextlib.contextmanager
def _pretended(arch: int) -> Iterator[None]:
    """PyTorch and Triton see one GPU of this architecture."""
    from torch._inductor import scheduler
    from torch.utils import _triton

    major, minor = divmod(arch, 10)
    properties = types.SimpleNamespace(
        major=major, minor=minor, multi_processor_count=MULTIPROCESSORS[arch], **_PROPERTIES
    )
    cuda = dict(
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_properties=lambda device=None: properties,
        get_device_capability=lambda device=None: (major, minor),
    )
    real = device_interface.get_interface_for_device("cuda")
    device_interface.register_interface_for_device("cuda", _interface(arch, properties))
    try:
        with (
            mock.patch.multiple(torch.cuda, **cuda),
            mock.patch.object(torch.version, "cuda", torch.version.cuda or "13.0"),
            mock.patch.object(scheduler, "has_triton", lambda: True),
            mock.patch.object(_triton, "triton_hash_with_backend", lambda: ""),
        ):
            yield
    finally:
        device_interface.register_interface_for_device("cuda", real)


def _interface(arch: int, properties: types.SimpleNamespace) -> type:
    """What Inductor asks about devices."""

    class PretendedGpu(device_interface.CudaInterface):
        class Worker:
            set_device = staticmethod(lambda device: None)
            current_device = staticmethod(lambda: 0)
            get_device_properties = staticmethod(lambda device=None: properties)

        get_device_properties = Worker.get_device_properties
        get_compute_capability = staticmethod(lambda device=None: arch)
        current_device = staticmethod(lambda: 0)
        device_count = staticmethod(lambda: 1)
        is_available = staticmethod(lambda: True)
        is_bf16_supported = staticmethod(lambda including_emulation=False: True)

    return PretendedGpu


# ------------------------------------------------------------ a graph on the way through


class _Written(BaseException):
    """Raised when Inductor has written its code. Nothing on the way catches such an exception."""

    def __init__(self, lowering: inductor_graph.GraphLowering, code: str) -> None:
        self.lowering, self.code = lowering, code


def _stop(lowering: inductor_graph.GraphLowering) -> None:
    written, _ = lowering.codegen()
    raise _Written(lowering, written.value)


def _move(gm: fx.GraphModule, example_inputs: Sequence[object]) -> list[object]:
    """Let the graph make its tensors on the GPU; returns its inputs there, fake ones."""
    for node in gm.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": GPU}
    gm.recompile()
    with detect_fake_mode(example_inputs):
        return [_strided(t, t.stride(), GPU) if torch.is_tensor(t) else t for t in example_inputs]


def _strided(like: Tensor, strides: Sequence[int], device: torch.device | str) -> Tensor:
    return torch.empty_strided(like.shape, strides, dtype=like.dtype, device=device)


@dataclass(frozen=True)
class _Result:
    """A fake tensor, and the strides that Inductor gives to the real one."""

    fake: Tensor
    strides: tuple[int, ...]


class _StandIn(OutputCode):
    """In place of the compiled graph: returns tensors that nobody has computed."""

    def __init__(self, results: list[_Result | None]) -> None:
        super().__init__()
        self.results, self._boxed_call = results, True

    def __call__(self, inputs: list) -> list[Tensor | None]:
        inputs.clear()
        return [r and _strided(r.fake, r.strides, "cpu") for r in self.results]

    def post_compile(self, example_inputs: object, constants: object, graph_kwargs: object) -> None:
        context = TracingContext.try_get()
        if context is not None and context.output_strides is not None:
            context.output_strides += [r and r.strides for r in self.results]

    def set_triton_bundle(self, triton_bundle: object) -> None:
        """There is none."""


def _results(
    gm: fx.GraphModule, lowering: inductor_graph.GraphLowering
) -> Iterator[_Result | None]:
    """The results of a graph; None for what is no tensor."""
    (nodes,) = gm.graph.find_nodes(op="output")[0].args
    for node, out in zip(nodes, lowering.graph_outputs):
        value = node.meta["val"] if isinstance(node, fx.Node) else None
        is_tensor = torch.is_tensor(value)
        yield _Result(value, tuple(int(s) for s in out.get_stride())) if is_tensor else None


# ------------------------------------------------------------ what it launches


def _read(gm: fx.GraphModule, code: str, namespace: str, backward: bool) -> Graph:
    """Take the launches from the code that calls them, and their bytes from the kernels' own."""
    call = code[code.rindex("def call(") :].partition("\nrunner = ")[0]
    sizes = dict(re.findall(r"'kernel_name': '(\w+)'.*?'kernel_num_gb': ([\d.e-]+)", code))
    launched = re.findall(r"^ +(\w+)\.run\(", call, re.M)
    kernels = [Call(name, round(1e9 * float(sizes[name]))) for name in launched]
    ops = [_op_call(n) for n in gm.graph.nodes if _namespace(n) == namespace]
    called = re.findall(r"^ +(?:\w+ = )?(?:torch\.ops|extern_kernels)\.([\w.]+)\(", call, re.M)
    others = [name for name in called if not name.startswith(f"{namespace}.")]
    others += ["sum"] * len(re.findall(r"= workspace_\d+\[.*\.sum\(dim=0\)", call))
    return Graph(backward, kernels, ops, others, code)


def _namespace(node: fx.Node) -> str | None:
    return node.target.namespace if isinstance(node.target, torch._ops.OpOverload) else None


def _op_call(node: fx.Node) -> Call:
    """An op with the bytes of its operands and results."""
    results = node.meta["val"]
    results = results if isinstance(results, (tuple, list)) else [results]
    tensors = [*(n.meta["val"] for n in node.all_input_nodes), *results]
    nbytes = sum(t.numel() * t.element_size() for t in tensors if torch.is_tensor(t))
    return Call(node.target._schema.name, nbytes)
