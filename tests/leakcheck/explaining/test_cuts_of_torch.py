"""Cutting what tensors and torch's modules hold: apart from other cuts, as a heap with torch is many times as large."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import msgspec
import pytest
import torch

from lowtide.leakcheck.explaining.cut import Names, Refused
from lowtide.leakcheck.explaining.cuts import cut_of
from lowtide.leakcheck.explaining.explain import explain
from lowtide.leakcheck.explaining.library_objects import HANDLE
from lowtide.probes.heap.paths import Link
from tests.leakcheck.explaining.executing import execute
from tests.leakcheck.explaining.test_cuts import Case, Load, Others, Tried, as_program, cut_all, load

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
        "put back what program.NETWORK.linear was",
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


@pytest.mark.nightly
def test_what_a_torch_module_has_registered_is_refused_until_the_program_is_over(load: Load) -> None:
    network = load(REGISTERED).NETWORK
    things = [network.table, network[0].weight, network[1]]
    edges = [".table", "[0].weight", "[1]"]
    older = Others(*things)
    reported = explain(things, innocent=older, names=Names(older))
    assert [found.holder for found in reported] == [f"program.NETWORK{edge}" for edge in edges]
    assert [found.cut for found in reported] == [None, None, None]
    over = explain(things, innocent=older, names=Names(older, are_free=True))
    cuts = [found.cut for found in over if found.cut is not None]
    assert [(cut.code, cut.is_code) for cut in cuts] == [
        ("del program.NETWORK.table", True),
        # Without it the layer does not run.
        ("put back what program.NETWORK[0].weight was", False),
        ("del program.NETWORK[1]", True),
    ]
    for cut in cuts[::2]:
        execute(cut.code)
    assert network(torch.ones(1, 1)).shape == (1, 1)
    cuts[1].apply()
    assert (len(network), network[0].weight, [*network.buffers()]) == (1, None, [])


LAYER = """
import torch
from torch.nn.utils import parametrize, prune, weight_norm


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(1, 2))

    def forward(self, weight):
        return weight * self.scale


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1, bias=False)

    def forward(self, x):
        return self.linear(x)


NETWORK = Network()


def pruned():
    prune.identity(NETWORK.linear, "weight")
    return NETWORK.linear.weight_mask


def parametrized():
    parametrize.register_parametrization(NETWORK.linear, "weight", Scaled())
    return NETWORK.linear.parametrizations.weight[0].scale


def normed():
    weight_norm(NETWORK.linear)
    return NETWORK.linear.weight_v


def hooked():
    thing = torch.ones(1)
    NETWORK.register_forward_hook(lambda module, inputs, output: (output, thing)[0])
    return thing


def hooked_tensor():
    thing = torch.ones(1)
    NETWORK.linear.weight.register_hook(lambda gradient: (gradient, thing)[0])
    return thing
"""


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize(
    ("way", "action"),
    [
        ("pruned", "torch.nn.utils.prune.remove(program.NETWORK.linear, 'weight')"),
        ("parametrized", "torch.nn.utils.parametrize.remove_parametrizations(program.NETWORK.linear, 'weight')"),
        ("normed", "torch.nn.utils.remove_weight_norm(program.NETWORK.linear, 'weight')"),
        ("hooked", f"hook [*]: {HANDLE}"),
        ("hooked_tensor", f"hook [*]: {HANDLE}"),
    ],
)
@pytest.mark.nightly
def test_what_torch_has_put_into_a_module_goes_by_what_torch_offers_and_the_module_runs(
    load: Load, way: str, action: str
) -> None:
    program = load(LAYER)
    before = set(map(id, gc.get_objects()))
    things = [getattr(program, way)()]
    older = Others(*(item for item in gc.get_objects() if id(item) not in before))
    watched = weakref.ref(things[0])
    (reported,) = explain(things, innocent=older, names=Names(older, are_free=True))
    things.clear()
    assert reported.cut is not None
    assert re.sub(r"\[\d+\]", "[*]", reported.cut.code) == action
    if reported.cut.is_code:
        execute(reported.cut.code)
    else:
        reported.cut.apply()
    gc.collect()
    assert watched() is None
    program.NETWORK(torch.ones(3, 2)).sum().backward()
    assert [name for name, _ in program.NETWORK.named_parameters()] == ["linear.weight"]


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
        cut_of(msgspec.structs.replace(link, held=id(old)), "helper.entries", Names(older=Others(new)))
    cut.apply()
    assert list(entries.values()) == [1, 3]
