"""What a test replaces judges nothing: the checker reads with the functions that there were when it was imported."""

from __future__ import annotations

import builtins
import decimal
import functools
import gc
import importlib
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.leakcheck.resources.settings import changes_between
from lowtide.probes import originals
from lowtide.probes.host.counters import CounterReader
from lowtide.probes.original_numpy import np


def test_what_a_test_replaces_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = CounterReader(None)
    before = reader.read()
    with monkeypatch.context() as patched:
        for place, names in REPLACED.items():
            for name in names.split():
                patched.setattr(f"{place}.{name}", refuses)
        after = reader.read()
    assert after.items["file-descriptors"] == before.items["file-descriptors"]
    changes = changes_between(before.settings, after.settings)
    assert {change.setting for change in changes if not change.is_replaced} == set()


REPLACED = {
    "os": "open read close listdir scandir stat fstat readlink getpid waitid",
    "time": "time perf_counter monotonic sleep",
    "threading": "enumerate current_thread gettrace",
    "gc": "get_freeze_count get_objects isenabled",
    "builtins": "open",
    "numpy": "arange array concatenate empty flatnonzero frombuffer fromiter zeros",
}


def refuses(*args: object, **kwargs: object) -> None:
    raise AssertionError("what a test has replaced was called")


def test_what_is_no_function_is_read_where_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/nowhere"])
    monkeypatch.setattr(sys, "excepthook", refuses)
    monkeypatch.setattr(os, "environ", {"NAME": "value"})
    monkeypatch.setattr(os, "getpid", refuses)
    assert (originals.sys.path, originals.sys.excepthook) == (["/nowhere"], refuses)
    assert (dict(originals.os.environ), originals.os.getpid is refuses) == ({"NAME": "value"}, False)


def test_what_is_replaced_is_named_and_a_wrapper_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    before = originals.replaced()
    wrapper = functools.wraps(os.listdir)(lambda path: [])
    monkeypatch.setattr(os, "listdir", wrapper)
    assert originals.replaced() == before
    monkeypatch.setattr(os, "stat", refuses)
    monkeypatch.setattr(builtins, "open", refuses)
    assert set(originals.replaced()) - set(before) == {"os.stat", "builtins.open"}


@pytest.mark.parametrize("entry", [None, ModuleType("decimal"), SimpleNamespace()])
def test_a_loaded_module_is_no_entry_that_a_test_has_made(entry: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert originals.loaded("decimal") is decimal
    monkeypatch.setitem(sys.modules, "decimal", entry)  # type: ignore[arg-type]
    assert originals.loaded("decimal") is decimal
    monkeypatch.delitem(sys.modules, "decimal")
    assert originals.loaded("decimal") is decimal


def test_a_module_that_is_loaded_anew_is_the_new_one_and_no_module_is_kept(tmp_path: Path) -> None:
    (tmp_path / "short_lived.py").write_text("")
    sys.path.insert(0, str(tmp_path))
    try:
        assert originals.loaded("short_lived") is None
        first = weakref.ref(importlib.import_module("short_lived"))
        assert originals.loaded("short_lived") is first()
        del sys.modules["short_lived"]
        second = importlib.import_module("short_lived")
        assert originals.loaded("short_lived") is second
        gc.collect()
        assert first() is None
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("short_lived", None)


def test_the_lines_of_a_file_end_at_line_breaks_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"first\x0c1\n\xff\nlast")
    assert originals.lines_of(str(file)) == ["first\x0c1", "\ufffd", "last"]
    file.write_bytes(b"")
    assert originals.lines_of(str(file)) == []


def numbers(kind: str, least: int, most: int) -> st.SearchStrategy[numpy.ndarray]:
    values = st.lists(st.integers(least, most), max_size=30)
    return values.map(lambda found: numpy.array(found, kind))


@given(st.data(), st.sampled_from(["int32", "int64", "uint32"]), st.sampled_from([40, 1 << 30]), st.booleans())
def test_what_numpy_finds_is_found_whatever_stands_in_the_place_of_its_parts(
    data: st.DataObject, kind: str, most: int, invert: bool
) -> None:
    items, others = data.draw(numbers(kind, 0, most)), data.draw(numbers(kind, 0, most))
    # Half of them are there.
    others = numpy.concatenate([others, items[::2]])
    expected, places = numpy.isin(items, others, invert=invert), numpy.flatnonzero(items)
    with pytest.MonkeyPatch.context() as patched:
        for name in [*REPLACED["numpy"].split(), "asarray", "nonzero", "ones", "ravel", "unique", "zeros_like"]:
            patched.setattr(numpy, name, refuses)
        found, own_places = np.isin(items, others, invert=invert), np.flatnonzero(items)
    assert found.tolist() == expected.tolist()
    assert own_places.tolist() == places.tolist()


def test_numpy_imports_nothing_in_the_middle_of_a_reading() -> None:
    script = (
        "import sys; from lowtide.probes.original_numpy import np; before = set(sys.modules); "
        "np.unique(np.arange(3)); np.isin(np.arange(3), np.arange(2)); print(sorted({*sys.modules} - before))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_what_stands_in_for_a_function_goes_unless_somebody_else_has_replaced_it() -> None:
    class Base:
        def read(self) -> str:
            return "read"

    class Derived(Base): ...

    place = SimpleNamespace(kept=lambda: "kept", replaced=lambda: "replaced")
    before = dict(vars(place))
    stand_ins = originals.StandIns()
    for where, name in ((place, "kept"), (place, "replaced"), (Derived, "read"), (place, "not there")):
        stand_ins.put(where, name, lambda original: lambda *arguments: f"ours, then {original(*arguments)}")
    assert (place.kept(), Derived().read(), Base().read()) == ("ours, then kept", "ours, then read", "read")
    theirs = place.replaced = lambda: "theirs"
    stand_ins.restore()
    assert vars(place) == {**before, "replaced": theirs}
    assert "read" not in vars(Derived)
