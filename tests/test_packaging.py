"""What a wheel holds, and what importing fxfuse brings along."""

import os
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of this tree, unpacked."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("fxfuse", "patterns", "kernels"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    subprocess.run([*command, "--wheel-dir", out, tree], check=True, cwd=out)
    (packed,) = out.glob("fxfuse-*.whl")
    zipfile.ZipFile(packed).extractall(out / "unpacked")
    return out / "unpacked"


def run(code, cwd, path=None):
    """Run Python code in a process of its own; returns what it prints."""
    env = {**os.environ, "PYTHONPATH": str(path)} if path else None
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=cwd, env=env, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


def test_wheel_holds_the_three_rooms(wheel):
    for room, folder in (("fxfuse", "fxfuse"), ("patterns", "fxfuse/patterns"),
                         ("kernels", "fxfuse/kernels")):  # fmt: skip
        here = {path.name for path in (ROOT / room).glob("*.py")}
        packed = {path.name for path in (wheel / folder).glob("*.py")}
        assert here and packed == here
    tops = {path.name for path in wheel.iterdir() if not path.name.endswith(".dist-info")}
    assert tops == {"fxfuse"}


def test_wheel_names_its_entry_points(wheel):
    (info,) = wheel.glob("*.dist-info")
    points = ConfigParser()
    points.read(info / "entry_points.txt")
    assert points["console_scripts"]["fxfuse"] == "fxfuse.__main__:main"
    assert points["torch_dynamo_backends"]["fxfuse"] == "fxfuse:backend"


def test_wheel_works_from_elsewhere(wheel, tmp_path):
    code = (
        "import fxfuse, fxfuse.registry, fxfuse.kernels.ops; "
        "print(fxfuse.__file__); print(fxfuse.kernels.ops.__file__); "
        "print(*sorted(fxfuse.registry.patterns()))"
    )
    package, ops, patterns = run(code, tmp_path, wheel).splitlines()
    assert package == str(wheel / "fxfuse" / "__init__.py")
    assert ops == str(wheel / "fxfuse" / "kernels" / "ops.py")
    assert {"add_rms_norm", "rms_norm"} <= set(patterns.split())


@pytest.mark.parametrize("name", ["kernels", "patterns"])
def test_no_top_level_package_beside_fxfuse(name, tmp_path):
    """A `kernels` of ours would hide the package of that name that transformers uses."""
    found = run(f"from importlib.util import find_spec as f; print(f({name!r}))", tmp_path)
    assert f"{str(ROOT / name)!r}" not in found and f"{ROOT / name}/" not in found


def test_import_is_light(tmp_path):
    code = "import sys, fxfuse; print(*{m.partition('.')[0] for m in sys.modules})"
    loaded = set(run(code, tmp_path).split())
    assert "fxfuse" in loaded
    assert not loaded & {"triton", "transformers", "tabulate"}


def test_import_touches_no_gpu(tmp_path):
    assert run("import fxfuse, torch; print(torch.cuda.is_initialized())", tmp_path) == "False"


def test_backend_is_found_by_name(tmp_path):
    code = "import torch; print('fxfuse' in torch._dynamo.list_backends())"
    assert run(code, tmp_path) == "True"


def test_walking_the_package_ends():
    """torch walks the packages that TORCH_LOGS names."""
    walk = "pkgutil.walk_packages(fxfuse.__path__)"
    command = [sys.executable, "-c", f"import pkgutil, fxfuse; print(*(m.name for m in {walk}))"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "TORCH_LOGS": "+fxfuse"},
    )
    names = done.stdout.split()
    assert "rewrite" in names and len(names) == len(set(names)) < 60
