"""A plot of the share of the memory's ceiling by width, forward and backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from gpu_speed import Row


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write a PNG with a line for each op. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5), sharey=True, layout="constrained")
    for panel, gradients, name in zip(axes, (0, 1), ("forward", "backward")):
        for op, points in lines(rows, gradients).items():
            panel.plot(*zip(*points), marker="o", label=op)
        panel.axhline(1.0, color="grey", linewidth=0.8)
        panel.set(xscale="log", xlabel="columns", title=name, ylim=(0, None))
        widths = sorted({row.shape.N for row in rows})
        panel.set_xticks(widths, [str(N) for N in widths], rotation=60)
        panel.minorticks_off()
    axes[0].set_ylabel("share of a kernel that only reads and writes as much")
    axes[1].legend(fontsize="small")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def lines(rows: Sequence[Row], gradients: int) -> dict[str, list[tuple[int, float]]]:
    """By op, the widths and shares of one pass."""
    found = defaultdict(list)
    for row in rows:
        if row.gradients == gradients:
            found[row.shape.name].append((row.shape.N, row.share))
    return {op: sorted(points) for op, points in found.items()}
