"""The README's own code works as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import fxfuse
from fxfuse import registry

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_pattern_of_the_readme(tmp_path):
    (code,) = re.findall(r"```python\n(# unit_vector\.py\n.*?)```", README, re.DOTALL)
    assert len(code.strip().splitlines()) < 40
    file = tmp_path / "unit_vector.py"
    file.write_text(code)
    assert registry.load_file(file) == ["unit_vector"]
    try:
        check_unit_vectors()
    finally:
        del registry._KNOWN["unit_vector"]


def check_unit_vectors() -> None:
    class Model(torch.nn.Module):
        def forward(self, x):
            return (x / torch.sqrt((x**2).sum(-1, keepdim=True))).sin()

    x = torch.randn(4, 8, requires_grad=True)
    gm = fxfuse.apply(torch.fx.symbolic_trace(Model()), [x])
    assert gm.meta["fxfuse"].counts == {"unit_vector": 1}
    got, want = (torch.autograd.grad(f(x).sum(), x)[0] for f in (gm, Model()))
    torch.testing.assert_close(got, want)
    half = fxfuse.apply(torch.fx.symbolic_trace(Model()), [x.detach().half()])
    assert "only float32 so far" in [miss.reason for miss in half.meta["fxfuse"].misses]
