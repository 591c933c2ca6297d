"""The `lowtide` command: parsing and printing, nothing else."""

from lowtide.leakcheck.cli.commands import app, main

__all__ = ["app", "main"]
