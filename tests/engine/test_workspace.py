"""Workspaces grow in place."""

from __future__ import annotations

import pytest
import torch

from lowtide.engine.device_allocator.arena import Arena, Workspace, WorkspaceViews
from lowtide.engine.errors import OutOfMemoryError
from lowtide.engine.pages.cpu import CpuPages

MIB = 1 << 20


def make(capacity: int = 64 * MIB) -> tuple[Arena, Workspace]:
    arena = Arena("workspace", capacity, CpuPages())
    return arena, Workspace(arena)


def test_tensors_lie_side_by_side_and_do_not_overlap() -> None:
    _, workspace = make()
    first, second = workspace.get(((100,), torch.bfloat16), ((3, 4), torch.float32))
    first.fill_(1)
    second.fill_(2)
    assert first.sum() == 100
    assert second.shape == (3, 4)
    assert first.data_ptr() + 200 <= second.data_ptr()


def test_growing_keeps_the_address_and_never_holds_old_and_new() -> None:
    arena, workspace = make()
    (small,) = workspace.get(((MIB,), torch.uint8))
    (large,) = workspace.get(((8 * MIB,), torch.uint8))
    assert large.data_ptr() == small.data_ptr()
    assert arena.mapped == 8 * MIB


def test_what_was_enough_is_not_mapped_again() -> None:
    arena, workspace = make()
    workspace.get(((8 * MIB,), torch.uint8))
    workspace.get(((MIB,), torch.uint8))
    assert arena.mapped == 8 * MIB


def test_a_view_that_somebody_kept_still_reads_its_bytes_after_growth() -> None:
    _, workspace = make()
    (kept,) = workspace.get(((1000,), torch.float32))
    kept.fill_(5.0)
    workspace.get(((8 * MIB,), torch.uint8))
    assert kept.sum() == 5000.0


def test_beyond_its_capacity_it_says_what_to_lower() -> None:
    _, workspace = make(MIB)
    with pytest.raises(OutOfMemoryError, match="lower max_num_batched_tokens or max_model_len"):
        workspace.get(((2 * MIB,), torch.uint8))


def test_dropped_pages_come_back_with_the_next_get() -> None:
    arena, workspace = make()
    workspace.get(((MIB,), torch.uint8))
    workspace.drop_pages()
    assert arena.mapped == 0
    (again,) = workspace.get(((MIB,), torch.uint8))
    again.fill_(1)
    assert arena.mapped == MIB


def test_views_are_cut_once_for_the_same_tensors_and_anew_for_others() -> None:
    _, workspace = make()
    views = WorkspaceViews(workspace)
    first = views.get(((100,), torch.float32))
    assert views.get(((100,), torch.float32))[0] is first[0]
    (other,) = views.get(((100,), torch.float16))
    assert other.dtype is torch.float16


def test_views_have_pages_again_after_a_sleep() -> None:
    arena, workspace = make()
    views = WorkspaceViews(workspace)
    (kept,) = views.get(((MIB,), torch.uint8))
    workspace.drop_pages()
    (again,) = views.get(((MIB,), torch.uint8))
    assert again is kept
    assert arena.mapped == MIB
