"""Runs the files `interpreted*.py` where the kernels are loaded for Triton's interpreter.

The interpreter is chosen when a kernel is defined, for a whole process, so it gets its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
triton, numpy = pytest.importorskip("triton"), pytest.importorskip("numpy")


def older(package, than: tuple[int, int]) -> bool:
    return tuple(int(part) for part in package.__version__.split(".")[:2]) < than


@pytest.mark.skipif(
    older(triton, (3, 7)) and not older(numpy, (2, 4)),
    reason="Triton's interpreter before 3.7 makes ints of arrays, which NumPy 2.4 refuses",
)
@pytest.mark.parametrize("file", sorted(path.name for path in HERE.glob("interpreted*.py")))
def test_the_kernels_in_the_interpreter(file):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", HERE / file]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert "skipped" not in ran.stdout
