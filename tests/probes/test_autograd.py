"""What the nodes of a graph have saved is found, and finding it leaves nothing."""

from __future__ import annotations

import torch

from lowtide.probes.memory.autograd import saved_behind
from lowtide.probes.objects.listed import all_instances


def names_and_shapes(output: torch.Tensor) -> list[tuple[str, tuple[int, ...]]]:
    return [(saved.name, tuple(saved.tensor.shape)) for saved in saved_behind(output, set())]


def test_what_a_graph_has_saved_alone_is_no_more_in_sight_after_it_was_found() -> None:
    output = torch.ones(1000, requires_grad=True).exp().sum()
    before = len(all_instances(torch.Tensor))
    assert names_and_shapes(output) == [("result", (1000,)), ("variable", (1000,))]
    assert len(all_instances(torch.Tensor)) == before


def test_what_was_changed_in_place_since_is_found() -> None:
    exponential = torch.ones(1000, requires_grad=True).exp()
    output = exponential.sum()
    with torch.no_grad():
        exponential.add_(1)
    assert ("result", (1000,)) in names_and_shapes(output)


def test_what_is_gone_after_backward_is_not_looked_for() -> None:
    output = torch.ones(1000, requires_grad=True).exp().sum()
    output.backward()
    assert names_and_shapes(output) == [("variable", (1000,))]


class Doubled(torch.autograd.Function):
    """A function of a program's own, which says what is taken out."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x * 3)
        return x * 2

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 2


def test_what_a_function_of_the_programs_own_has_saved_is_found() -> None:
    output = Doubled.apply(torch.ones(10, requires_grad=True))
    assert names_and_shapes(output) == [("tensors", (10,)), ("variable", (10,))]
