"""`python -m fxfuse`, and the `fxfuse` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    from fxfuse import cli

    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main())
