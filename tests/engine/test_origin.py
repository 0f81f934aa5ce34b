"""Module paths and lines as a reader would write them."""

from __future__ import annotations

import pytest
from torch import fx

from fxfuse import origin


def node(**meta) -> fx.Node:
    made = fx.Graph().placeholder("x")
    made.meta.update(meta)
    return made


@pytest.mark.parametrize(
    ("recorded", "path"),
    [
        ("L['self'].model.layers.0.norm", "model.layers.0.norm"),
        ("L['args'][0].model.norm", "model.norm"),
        ("L['self']._modules['layers'][3].norm", "layers.3.norm"),
        ("L['self']", ""),
        ("model.layers.1", "model.layers.1"),
    ],
)
def test_module_paths(recorded, path):
    stack = {"a": ("L['self']", object), "b": (recorded, object)}
    assert origin.module_path(node(nn_module_stack=stack)) == path


def test_lines_leave_out_torch_itself():
    trace = (
        '  File "/somewhere/site-packages/pkg/model.py", line 7, in forward\n    y = norm(x)\n'
        f'  File "{origin._TORCH}nn/modules/normalization.py", line 9, in forward\n    return\n'
    )
    assert origin.code_line(node(stack_trace=trace)) == "pkg/model.py:7"
    assert origin.code_line(node()) == ""
