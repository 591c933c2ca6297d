"""Cutting what tensors and torch's modules hold: apart from other cuts, as a heap with torch is many times as large."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from lowtide.leakcheck.explaining.cut import Names, Refused
from lowtide.leakcheck.explaining.cuts import cut_of
from lowtide.leakcheck.explaining.explain import explain
from lowtide.probes.heap.paths import Link
from tests.leakcheck.test_cuts import Case, Load, Others, Tried, as_program, cut_all, load

__all__ = ["load"]

NETWORK = """
import torch


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mask = None
        self.cache = []
        self.linear = torch.nn.Linear(1, 1)


NETWORK = Network()
"""


def hold_in_an_attribute_that_begins_as_none(program: Any, thing: Any) -> None:
    program.NETWORK.mask = thing


def hold_in_an_attribute_that_begins_otherwise(program: Any, thing: Any) -> None:
    program.NETWORK.cache = thing


def hold_as_a_registered_part(program: Any, thing: Any) -> None:
    program.NETWORK._modules["linear"] = thing


def as_at_import(program: Any) -> bool:
    return program.NETWORK.mask is None and program.NETWORK.cache == []


CASES = {
    "attribute_that_begins_as_none": Case(
        hold_in_an_attribute_that_begins_as_none, "program.NETWORK.mask = None", NETWORK, "", as_at_import, "before"
    ),
    "attribute_that_begins_otherwise": Case(
        hold_in_an_attribute_that_begins_otherwise, None, NETWORK, "", lambda program: True, "before"
    ),
    "registered_part": Case(hold_as_a_registered_part, None, NETWORK, "", lambda program: True, "before"),
    "registered_part_when_the_program_is_over": Case(
        hold_as_a_registered_part,
        "program.NETWORK.linear = None",
        NETWORK,
        "",
        lambda program: program.NETWORK.linear is None,
        "over",
    ),
}


@pytest.fixture(scope="module")
def cut_cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tried]:
    return cut_all(CASES, tmp_path_factory.mktemp("programs"))


@pytest.mark.parametrize("name", CASES)
def test_how_what_a_module_holds_is_cut(cut_cases: dict[str, Tried], name: str) -> None:
    found = cut_cases[name]
    assert as_program(found.cut.code if found.cut is not None else None, name) == CASES[name].action
    if found.cut is not None:
        assert (found.failure, found.lived, found.died, found.left) == ("", True, True, True)


def test_the_gradient_of_an_old_tensor_is_dropped(load: Load) -> None:
    program = load("import torch\nWEIGHT = torch.ones(3, requires_grad=True)")
    (program.WEIGHT * 2).sum().backward()
    gradient = program.WEIGHT.grad
    link = Link(".grad", "instance-attribute", program.WEIGHT, program.WEIGHT, id(gradient))
    cut = cut_of(link, "program.WEIGHT", Names(Others(gradient)))
    assert cut is not None
    assert cut.code == "program.WEIGHT.grad = None"
    cut.apply()
    assert program.WEIGHT.grad is None
    assert torch.equal(program.WEIGHT.detach(), torch.ones(3))


REGISTERED = """
import torch

NETWORK = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
NETWORK.register_buffer("table", torch.ones(1))
"""


def test_what_a_torch_module_has_registered_is_refused_until_the_program_is_over(load: Load) -> None:
    network = load(REGISTERED).NETWORK
    things = [network.table, network[0].weight, network[1]]
    edges = [".table", "[0].weight", "[1]"]
    older = Others(*things)
    reported = explain(things, innocent=older, names=Names(older))
    assert [found.holder for found in reported] == [f"program.NETWORK{edge}" for edge in edges]
    assert [found.cut for found in reported] == [None, None, None]
    over = explain(things, innocent=older, names=Names(older, are_free=True))
    assert [found.cut and found.cut.code for found in over] == [f"program.NETWORK{edge} = None" for edge in edges]
    for found in over:
        assert found.cut is not None
        found.cut.apply()
    assert [network.table, network[0].weight, network[1]] == [None, None, None]
    assert network[0].bias is not None


def test_a_new_key_is_deleted_with_its_entry_and_an_older_one_stays() -> None:
    old, new = torch.ones(1), torch.ones(1)
    entries = {old: 1, new: 2, "b": 3}
    link = Link("<key>", "item", entries, entries, id(new))
    cut = cut_of(link, "helper.entries", Names(older=Others(new)))
    assert cut is not None
    assert (cut.code, cut.is_code) == ("del helper.entries[list(helper.entries)[1]]", True)
    assert cut.place is not None
    assert (cut.place.container, cut.place.position) == (id(entries), 1)
    with pytest.raises(Refused):
        cut_of(dataclasses.replace(link, held=id(old)), "helper.entries", Names(older=Others(new)))
    cut.apply()
    assert list(entries.values()) == [1, 3]
