"""Tensors that only C++ holds: gradients, what an autograd graph has saved, and knots that no collector sees."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from lowtide.leakcheck.explaining.explain import Explanation
from lowtide.leakcheck.findings.storage_holders import (
    Context,
    as_gradients,
    explain_storages,
    saved_for_backward,
    together,
)
from lowtide.leakcheck.judging.owners import Claims
from lowtide.leakcheck.judging.storages import read_heap
from lowtide.probes.heap.births import Births

pytestmark = pytest.mark.nightly


def explanations_of(step: Callable[[], object]) -> dict[int, Explanation]:
    """What is said of each storage that a step leaves, by its bytes."""
    births = Births()
    births.start()
    try:
        gc.collect()
        births.mark("call")
        step()
        held = read_heap(births, Claims(()), (), ()).held
        context = Context(born=births.born())
    finally:
        births.stop()
    reported = explain_storages({storage.key for storage in held}, context).by_key
    return {storage.bytes: reported[storage.key] for storage in held}


def edges(reported: Explanation) -> list[tuple[str, bool]]:
    return [(hop.edge, hop.suspect) for hop in reported.path]


Load = Callable[[str], Any]


@pytest.fixture
def load(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Writes the source of a module `program` and imports it."""
    folder = tmp_path_factory.mktemp("program")
    monkeypatch.syspath_prepend(folder)

    def load(source: str) -> Any:
        (folder / "program.py").write_text(f"import torch\n{source}")
        importlib.invalidate_caches()
        return importlib.import_module("program")

    yield load
    del sys.modules["program"]


# --- gradients ------------------------------------------------------------------------------------------------------


def test_the_gradient_of_an_old_modules_parameter_is_the_only_suspect(load: Load) -> None:
    program = load("NETWORK = torch.nn.Linear(10, 5, bias=False)")

    def step() -> None:
        program.NETWORK(torch.ones(1, 10)).sum().backward()
        assert program.NETWORK.weight.grad is not None

    reported = explanations_of(step)[200]
    assert (reported.verdict, reported.cause) == ("reachable", "instance-attribute")
    assert reported.holder == "program.NETWORK.weight.grad"
    assert edges(reported) == [("program", False), (".NETWORK", False), (".weight", False), (".grad", True)]
    assert reported.suspects == (".grad",)
    assert reported.cut is not None
    assert reported.cut.code == "program.NETWORK.weight.grad = None"


def test_the_gradient_of_a_new_tensor_is_held_by_who_holds_the_tensor(load: Load) -> None:
    program = load("TABLE = {}")

    def step() -> None:
        program.TABLE["weight"] = weight = torch.ones(2, 3, requires_grad=True)
        (weight * 2).sum().backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        # So that the two can be told apart.
        weight.data = torch.ones(5)

    found = explanations_of(step)
    gradient = found[24]
    assert gradient.cause == "module-global"
    assert gradient.holder == "program.TABLE['weight'].grad"
    assert edges(gradient)[-2:] == [("['weight']", True), (".grad", True)]
    assert gradient.suspects == found[20].suspects
    assert gradient.cut is not None
    assert gradient.cut.code == "del program.TABLE['weight']"


def test_a_gradient_that_was_retained_belongs_to_its_tensor_too(load: Load) -> None:
    program = load("TABLE = {}\nWEIGHT = torch.ones(3, requires_grad=True)")

    def step() -> None:
        program.TABLE["hidden"] = hidden = torch.cat([program.WEIGHT, torch.ones(4)])
        hidden.retain_grad()
        hidden.sum().backward()  # type: ignore[no-untyped-call]
        assert hidden.grad is not None
        hidden.data = torch.ones(8)

    assert explanations_of(step)[28].holder == "program.TABLE['hidden'].grad"


def explained_as(**known: Any) -> Callable[[Sequence[Any]], list[Explanation]]:
    """Says the same of everything; `asked` collects what it was asked of."""
    asked: list[Any] = known.pop("asked")
    reported = Explanation("reachable", "module-global", "m.X", (), ("m .X",), **known)

    def explained(items: Sequence[Any]) -> list[Explanation]:
        asked.extend(map(id, items))
        return [reported for _ in items]

    return explained


def test_only_what_is_a_gradient_is_explained_as_one() -> None:
    weight, other = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    (weight.sum() * other.sum()).backward()  # type: ignore[no-untyped-call]
    gradient, loose = weight.grad, torch.ones(2)
    asked: list[Any] = []
    found = as_gradients([gradient, loose], (), explained_as(asked=asked))
    assert list(found) == [id(gradient)]
    assert asked == [id(weight)]
    assert found[id(gradient)].holder == "m.X.grad"


def test_nothing_is_asked_where_nothing_is_a_gradient() -> None:
    asked: list[Any] = []
    assert as_gradients([torch.ones(2)], (), explained_as(asked=asked)) == {}
    assert asked == []


class NoFunctions(torch.Tensor):
    """A subclass that lets nobody ask it anything."""

    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> Any:
        raise NotImplementedError


def test_no_code_of_a_tensor_subclass_runs() -> None:
    plain = torch.ones(2, requires_grad=True)
    (plain * 3).sum().backward()  # type: ignore[no-untyped-call]
    hostile = torch.ones(2).as_subclass(NoFunctions)
    asked: list[Any] = []
    assert list(as_gradients([plain.grad, hostile], (), explained_as(asked=asked))) == [id(plain.grad)]
    assert saved_for_backward([hostile], {id(hostile)}, explained_as(asked=asked)) == {}


# --- what a graph has saved -----------------------------------------------------------------------------------------

LOSSES = "LOSSES = []\nWEIGHT = torch.ones(5, requires_grad=True)"


def test_what_a_kept_loss_has_saved_is_held_by_the_loss(load: Load) -> None:
    program = load(LOSSES)

    def step() -> None:
        program.LOSSES.append((torch.ones(4, 5) * program.WEIGHT).sum() * 3)

    found = explanations_of(step)
    reported = found[80]
    assert (reported.verdict, reported.cause) == ("native-held", "autograd")
    assert reported.holder == "program.LOSSES[0].grad_fn, where MulBackward0 saved 'self'"
    assert edges(reported) == [
        ("program", False),
        (".LOSSES", False),
        ("[0]", True),
        (".grad_fn", False),
        (".next_functions[0][0]", False),
        (".next_functions[0][0]", False),
        ("._saved_self", False),
    ]
    assert [hop.type for hop in reported.path[3:]] == ["MulBackward0", "SumBackward0", "MulBackward0", "torch.Tensor"]
    assert reported.suspects == found[4].suspects
    assert reported.cut is not None
    assert reported.cut.code == "del program.LOSSES[0]"


class Keeping(torch.autograd.Function):
    """Keeps something in its context for as long as the graph lives."""

    @staticmethod
    def forward(context: Any, value: Any) -> Any:
        context.kept = {"table": torch.zeros(30)}
        return value * 2

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gradients[0]


def test_what_the_context_of_a_function_keeps_is_held_by_the_loss(load: Load) -> None:
    program = load(LOSSES)

    def step() -> None:
        program.LOSSES.append(Keeping.apply(program.WEIGHT).sum())  # type: ignore[no-untyped-call]

    reported = explanations_of(step)[120]
    assert (reported.verdict, reported.cause) == ("native-held", "autograd")
    assert reported.holder == "program.LOSSES[0].grad_fn, where KeepingBackward has .kept['table']"
    assert [hop.edge for hop in reported.path[-3:]] == [".next_functions[0][0]", ".kept", "['table']"]
    assert reported.cut is not None
    assert reported.cut.code == "del program.LOSSES[0]"


def test_a_leaf_at_the_end_of_a_kept_graph_is_held_by_it(load: Load) -> None:
    program = load(LOSSES)

    def step() -> None:
        program.LOSSES.append(torch.ones(7, requires_grad=True).sum())

    reported = explanations_of(step)[28]
    assert reported.holder == "program.LOSSES[0].grad_fn, where AccumulateGrad saved 'variable'"


class Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.ones(9))
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0]


def test_what_a_function_of_the_programs_own_has_saved_is_held_by_its_output(load: Load) -> None:
    program = load(LOSSES)

    def step() -> None:
        program.LOSSES.append(Saving.apply(program.WEIGHT))  # type: ignore[no-untyped-call]

    reported = explanations_of(step)[36]
    assert reported.cause == "autograd"
    assert reported.holder.startswith("program.LOSSES[0].grad_fn")
    assert reported.cut is not None
    assert reported.cut.code == "del program.LOSSES[0]"


def test_no_code_of_the_program_unpacks_what_was_saved(load: Load) -> None:
    program = load(LOSSES)
    unpacked: list[Any] = []

    def unpack(packed: Any) -> Any:
        unpacked.append(packed)
        return packed[0]

    def step() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: [tensor], unpack):
            program.LOSSES.append((torch.ones(4, 5) * program.WEIGHT).sum())

    reported = explanations_of(step)
    assert unpacked == []
    assert reported[4].holder == "program.LOSSES[0]"


def test_a_graph_that_was_used_up_holds_nothing(load: Load) -> None:
    program = load(LOSSES)

    def step() -> None:
        loss = (torch.ones(4, 5) * program.WEIGHT).sum()
        loss.backward()
        program.LOSSES.append(loss)

    found = explanations_of(step)
    assert 80 not in found
    assert found[4].holder == "program.LOSSES[0]"


def test_a_node_of_a_graph_that_is_kept_alone_is_named_with_what_it_leads_to(load: Load) -> None:
    program = load(LOSSES)

    def step() -> None:
        program.LOSSES.append((torch.ones(4, 5) * program.WEIGHT).sum().grad_fn)

    found = explanations_of(step)[80]
    assert found.holder == "program.LOSSES[0], where MulBackward0 saved 'self'"
    assert [edge for edge, _ in edges(found)][-3:] == ["[0]", ".next_functions[0][0]", "._saved_self"]
    assert found.cut is not None
    assert found.cut.code == "del program.LOSSES[0]"


def test_what_a_function_of_the_programs_keeps_is_held_by_a_node_behind_which_it_is(load: Load) -> None:
    program = load(LOSSES)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            ctx.kept = torch.ones(7)
            return value * 2

    def step() -> None:
        program.LOSSES.append(Doubled.apply(program.WEIGHT).sum().grad_fn)  # type: ignore[no-untyped-call]

    assert explanations_of(step)[28].holder == "program.LOSSES[0], where DoubledBackward has .kept"


def test_the_name_of_a_node_keeps_nothing(load: Load) -> None:
    program = load(LOSSES)

    def step() -> None:
        program.LOSSES.append((torch.ones(4, 5) * program.WEIGHT).sum().grad_fn.name())

    assert explanations_of(step) == {}


def test_a_graph_of_many_nodes_is_gone_through_once(load: Load) -> None:
    program = load(LOSSES)

    def step() -> None:
        value = torch.ones(4, 5) * program.WEIGHT
        for _ in range(40):
            # Two ways to each node: 2**40 ways to the first.
            value = value + value
        program.LOSSES.append(value.sum())

    assert explanations_of(step)[80].holder.endswith("where MulBackward0 saved 'self'")


def test_of_a_graph_whose_output_nobody_holds_nothing_is_said() -> None:
    asked: list[Any] = []
    explained = explained_as(asked=asked)
    saved = torch.ones(4, 5)
    loss = (saved * torch.ones(5, requires_grad=True)).sum()
    # Whoever explains the output knows of no path to it.
    assert saved_for_backward([saved], {id(saved)}, explained) == {}
    assert asked == [id(loss)]


# --- knots ----------------------------------------------------------------------------------------------------------


def test_a_graph_that_ends_in_itself_is_one_knot() -> None:
    weights: list[weakref.ref[Any]] = []

    def step() -> None:
        weight: Any = torch.ones(10, requires_grad=True)
        weight.loss = (weight * 2).sum()
        weights.append(weakref.ref(weight))

    found = explanations_of(step)
    assert sorted(found) == [4, 40]
    assert found[4] == found[40]
    assert found[4].verdict == "native-held"
    assert found[4].holder.startswith("a cycle through C++ (")
    assert found[4].path == ()
    assert found[4].cut is None
    # No collection frees it.
    del weights[0]().loss


def without_path(holder: str, verdict: Any = "native-held", cause: Any = "native") -> Explanation:
    return Explanation(verdict, cause, holder, (), (holder,))


def autograd(node: str) -> Explanation:
    return without_path(f"autograd graph, made by {node}", cause="autograd")


def test_what_has_one_story_keeps_it() -> None:
    one = {"a": without_path("native code"), "b": without_path("native code"), "c": without_path("", "unexplained")}
    assert together(one) == one
    assert together({}) == {}


def test_stories_of_several_holders_are_one_knot_with_the_nodes_in_it() -> None:
    reported = together(
        {
            "a": autograd("MulBackward0"),
            "b": autograd("SumBackward0"),
            "c": without_path("native code"),
            "d": without_path("garbage: dict", "unexplained", "cycle"),
        }
    )
    (knot,) = set(map(id, reported.values()))
    assert knot == id(reported["a"])
    assert (reported["a"].verdict, reported["a"].cause, reported["a"].path) == ("native-held", "autograd", ())
    assert reported["a"].holder == (
        "a cycle through C++ (autograd graph, made by MulBackward0, autograd graph, made by SumBackward0)"
    )
    assert reported["a"].suspects == ("autograd graph, made by MulBackward0", "autograd graph, made by SumBackward0")


def test_of_many_holders_the_first_are_named() -> None:
    reported = together({number: autograd(f"Node{number}") for number in range(6)})
    assert reported[0].holder.endswith("made by Node3 and 2 more)")
    assert len(reported[0].suspects) == 6


def test_without_nodes_the_knot_is_native() -> None:
    reported = together({"a": without_path("native code"), "b": without_path("garbage: dict", "unexplained", "cycle")})
    assert (reported["a"].cause, reported["a"].holder) == ("native", "a cycle through C++ (garbage: dict)")


def test_what_has_a_path_or_is_frozen_is_no_part_of_a_knot(load: Load) -> None:
    frozen = Explanation("frozen-garbage", "frozen-garbage", "", (), ("frozen garbage",))
    program = load("LOSSES = []")
    with_path = explanations_of(lambda: program.LOSSES.append(torch.ones(1)))[4]
    reported = together({"a": autograd("A"), "b": autograd("B"), "frozen": frozen, "held": with_path})
    assert (reported["frozen"], reported["held"]) == (frozen, with_path)
    assert reported["a"] is reported["b"]
