"""`lowtide ps`: who holds memory on this host."""

from __future__ import annotations

import datetime
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

import lowtide
from lowtide.leakcheck.cli.console import find_console, interruptible, refuse, say, write
from lowtide.leakcheck.cli.growth_report import bytes_of, seconds_of
from lowtide.reports.escaping import escape_json

if TYPE_CHECKING:
    from lowtide.probes.device.driver import Driver
    from lowtide.reports.processes.listing import Listing

_SHORTEST_S = 0.5
"""Seconds between two lists."""


def ps(
    fail_above: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Fail where a card, an orphan or all files of the dead hold more: 1GiB."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with stable names (lowtide-ps/1).")] = False,
    watch: Annotated[
        str | None, typer.Option(metavar="TIME", help="List it again each so often, until Ctrl-C: 2s, 1m.")
    ] = None,
) -> None:
    """List who holds memory on each card, engines without a card and orphans, and files of the dead in /dev/shm.

    Exit codes: 0 listed; with --fail-above: 1 something holds more, 2 a card could not be measured; 2 nothing could be
    measured, or bad input.
    """
    limit = None if fail_above is None else bytes_of("--fail-above", fail_above)
    if watch is not None and (as_json or limit is not None):
        refuse("--watch redraws a terminal: leave --json and --fail-above out")
    from lowtide.probes.device.driver import find_driver

    with closing(find_driver()) as driver:
        if watch is None:
            raise typer.Exit(_list(driver, limit, as_json))
        with interruptible("ended"):
            _list_again(driver, seconds_of("--watch", watch))


def _list_again(driver: Driver, seconds: float) -> None:
    if seconds < _SHORTEST_S:
        refuse(f"--watch {seconds:g} is not possible: use {_SHORTEST_S:g} s or more")
    while True:
        if sys.stdout.isatty():
            find_console().clear()
        _list(driver, None, as_json=False)
        sys.stdout.flush()
        time.sleep(seconds)


def _list(driver: Driver, limit: int | None, as_json: bool) -> int:
    """Print who holds what; return the exit code."""
    from lowtide.probes.processes.outside_view import read_holders
    from lowtide.reports.processes.listing import encode, make_listing
    from lowtide.reports.processes.text import render

    now = datetime.datetime.now(datetime.timezone.utc)
    listing = make_listing(read_holders(driver), version=lowtide.__version__, now=now, limit=limit)
    write(f"{escape_json(encode(listing))}\n" if as_json else render(listing))
    code = _exit_code(listing)
    if code == 2:
        say("lowtide: what a card holds could not be measured", err=True)
    return code


def _exit_code(listing: Listing) -> int:
    if listing.exceeded:
        return 1
    unknown = {each.what for each in listing.not_measured}
    cards = {"cards", *(card.device for card in listing.cards)}
    if listing.limit is not None and unknown & cards:
        return 2
    return 2 if {"cards", "/dev/shm"} <= unknown else 0
