"""The `lowtide` command, which is also `python -m lowtide`, or one line that says which extra it needs."""

from __future__ import annotations

import sys

try:
    from lowtide.leakcheck.cli.commands import main
except ModuleNotFoundError as error:
    if error.name not in ("click", "rich", "typer"):
        raise
    # Not by the commands' own printing, which needs what is missing.
    remedy = 'pip install "lowtide[cli]"'
    sys.stderr.write(f"lowtide: this command needs {error.name}, which cannot be imported ({error}): {remedy}\n")
    # `git bisect run` takes 2 for a bad commit, and stops at 128.
    sys.exit(128 if sys.argv[1:2] == ["bisect-step"] else 2)

__all__ = ["main"]

if __name__ == "__main__":
    main()
