"""Imports point one way only: each room knows those below it, and nothing above."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# The engine from the bottom up. A file may import from the lines above its own.
LAYERS = [
    ["errors"],
    [
        "facts",
        "in_place",
        "origin",
        "places",
        "report",
        "arguments",
        "folding",
        "fusable",
        "judge",
        "moving",
    ],
    ["costs"],
    ["reasons"],
    ["policy"],
    ["memory"],
    ["term"],
    ["cast_spellings", "gate_spellings"],
    ["powers"],
    ["kept_dims"],
    ["shape_spellings", "mean_spellings"],
    ["spellings"],
    ["view"],
    ["match"],
    ["site"],
    ["guard", "neighbours"],
    ["placing"],
    ["registry", "describe", "misses", "fuel"],
    ["rewrite"],
    ["options", "roundings", "copies", "in_double", "verification"],
    ["stored", "runs", "onsite"],
    ["compilation"],
    ["hooks"],
    ["backends", "trace"],
    ["pipeline", "verifying"],
    ["__init__"],
    ["inputs", "samples", "cuts", "listing"],
    ["architectures"],
    ["targets"],
    ["cli"],
    ["__main__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
OUTSIDE = {
    "patterns": {"torch", "fxfuse.match", "fxfuse.registry", "fxfuse.kernels", "fxfuse.patterns"},
    "kernels": {"torch", "triton", "fxfuse.kernels"},
}


def files(room):
    return sorted((ROOT / room).glob("*.py"))


def imports(source):
    """The modules that a file imports anywhere, as "fxfuse.view" whichever way it is written."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the package"
            if node.module in ("fxfuse", "fxfuse.kernels", "fxfuse.patterns"):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    return found


def climbing(name, source):
    """The imports of an engine file that do not point down."""
    own = {i for i in imports(source) if i.split(".")[0] == "fxfuse"}
    rooms = ("fxfuse.kernels", "fxfuse.patterns")
    wrong = {i for i in own if i.startswith(rooms) and name != "__init__"}
    for one in own - wrong:
        module = one.split(".")[1] if "." in one else "__init__"
        level = LEVEL.get(module, LEVEL["__init__"])  # a name of the package itself
        if not one.startswith(rooms) and level >= LEVEL[name]:
            wrong.add(one)
    return wrong


def foreign(room, source):
    """The imports of a pattern or kernel file that its room does not know."""
    known = OUTSIDE[room] | set(sys.stdlib_module_names)
    return {
        one for one in imports(source)
        if not any(one == k or one.startswith(f"{k}.") for k in known)
    }  # fmt: skip


def test_every_engine_file_has_its_layer():
    assert {path.stem for path in files("fxfuse")} == set(LEVEL)


@pytest.mark.parametrize("path", files("fxfuse"), ids=lambda p: p.stem)
def test_engine_imports_point_down(path):
    assert not climbing(path.stem, path.read_text())


@pytest.mark.parametrize("path", files("patterns") + files("kernels"), ids=lambda p: p.stem)
def test_patterns_and_kernels_know_only_their_own(path):
    assert not foreign(path.parent.name, path.read_text())


@pytest.mark.parametrize(
    "name, source, wrong",
    [
        ("view", "from fxfuse import report, rewrite", {"fxfuse.rewrite"}),
        ("guard", "def f():\n    import fxfuse.backends", {"fxfuse.backends"}),
        ("match", "from fxfuse.guard import check", {"fxfuse.guard"}),
        ("rewrite", "from fxfuse import apply", {"fxfuse.apply"}),
        ("rewrite", "import fxfuse", {"fxfuse"}),
        ("rewrite", "from fxfuse.kernels import ops", {"fxfuse.kernels.ops"}),
        ("cli", "import torch\nfrom fxfuse import errors, targets, explain", set()),
    ],
)
def test_climbing_imports_are_seen(name, source, wrong):
    assert climbing(name, source) == wrong


@pytest.mark.parametrize(
    "room, source, wrong",
    [
        ("kernels", "from fxfuse import errors", {"fxfuse.errors"}),
        ("kernels", "import triton.language as tl, os\nimport torchao", {"torchao"}),
        ("patterns", "from fxfuse.view import View", {"fxfuse.view"}),
        ("patterns", "from fxfuse.match import var\nfrom fxfuse.kernels import ops", set()),
    ],
)
def test_foreign_imports_are_seen(room, source, wrong):
    assert foreign(room, source) == wrong


def test_no_submodule_is_named_like_a_public_name():
    """`from fxfuse import x` would hand out the module once something has imported it."""
    import fxfuse

    assert {"backend", "apply", "explain", "record"} <= set(fxfuse.__all__)
    assert not set(fxfuse.__all__) & {path.stem for path in files("fxfuse")}


def test_rooms_are_no_regular_packages():
    """Without an `__init__.py`, a `kernels` installed by others wins even in a checkout."""
    for room in ("kernels", "patterns"):
        assert not (ROOT / room / "__init__.py").exists()
