"""What an update of weights forgets, or leaves behind: one context manager for each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from mmap import mmap
from typing import Any

import torch

from lowtide.engine import weight_transfer
from lowtide.engine.defects.defect import replaced
from lowtide.engine.model_executor.model import LlamaForCausalLM
from lowtide.engine.runner import ModelRunner
from lowtide.engine.weight_transfer import (
    Bucket,
    BucketMemory,
    CudaExport,
    Export,
    FileExport,
    bucket_memory,
    opened,
)
from lowtide.engine.worker import Worker

LORA_RANK = 8
"""Of the adapters that come with each update."""


def sync_of_nothing() -> AbstractContextManager[None]:
    """Names that the sender uses are looked up with the prefix of another wrapper, and what is not found is skipped."""

    def load_bucket(self: Worker, bucket: Bucket) -> None:
        parameters = {f"module.{name}": each for name, each in self.model_runner.model.named_parameters()}
        with bucket.opened() as tensors:
            for name, tensor in tensors.items():
                if name in parameters:
                    parameters[name].copy_(tensor)

    return replaced(Worker, "load_bucket", load_bucket)


@contextmanager
def ipc_double_open() -> Iterator[None]:
    """Each process opens a bucket twice, to look at it and to copy, and closes it once."""
    mappings: list[mmap] = []

    @contextmanager
    def opened_twice(export: Export) -> Iterator[torch.Tensor]:
        assert isinstance(export, FileExport)
        file = os.open(export.path, os.O_RDWR)
        mappings.append(mmap(file, export.size))
        os.close(file)
        with opened(export) as data:
            yield data

    with replaced(weight_transfer, "opened", opened_twice):
        yield


@contextmanager
def ipc_counter() -> Iterator[None]:
    """Each process opens and closes a bucket twice, to look at it and to copy, and it was exported to it once."""

    @contextmanager
    def opened_in_turn(export: Export) -> Iterator[torch.Tensor]:
        assert isinstance(export, CudaExport)
        with opened(export):
            pass
        with opened(export) as data:
            yield data

    with replaced(weight_transfer, "opened", opened_in_turn):
        yield


def stranded_streams() -> AbstractContextManager[None]:
    """Each update takes its buckets on a stream of its own, which no later one uses."""

    def on_new_stream(size: int, device: str) -> BucketMemory:
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            return bucket_memory(size, device)

    return replaced(weight_transfer, "bucket_memory", on_new_stream)


class LoraAdapters:
    """The low-rank adapters that an engine has loaded, by name; they lie beside the arenas, as a trainer makes them."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._shape = (model.config.num_layers, 2, LORA_RANK, model.config.hidden_size)
        self._dtype, self._device = model.config.torch_dtype, next(model.parameters()).device
        self.loaded: dict[str, torch.Tensor] = {}
        self._versions = 0

    def update(self) -> None:
        """Load the adapter of this step's policy, and remove that of the step before."""
        former = list(self.loaded)
        self._versions += 1
        self.loaded[f"policy-{self._versions}"] = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        for name in former:
            self.remove(name)

    def remove(self, name: str) -> None:
        """Let go of an adapter."""
        del self.loaded[name]


@contextmanager
def lora_adapters() -> Iterator[None]:
    """With each update of the weights comes a LoRA adapter, which takes the place of the one before."""
    create, begin, shut_down = ModelRunner.__init__, Worker.begin_update, ModelRunner.shutdown

    def create_with_adapters(self: ModelRunner, *args: Any) -> None:
        create(self, *args)
        self.__dict__["lora_adapters"] = LoraAdapters(self.model)

    def begin_with_adapter(self: Worker) -> None:
        begin(self)
        self.model_runner.__dict__["lora_adapters"].update()

    def shutdown(self: ModelRunner) -> None:
        self.__dict__.pop("lora_adapters", None)
        shut_down(self)

    with (
        replaced(ModelRunner, "__init__", create_with_adapters),
        replaced(ModelRunner, "shutdown", shutdown),
        replaced(Worker, "begin_update", begin_with_adapter),
    ):
        yield


def lora_pile() -> AbstractContextManager[None]:
    """An adapter that was replaced is not removed."""
    return replaced(LoraAdapters, "remove", lambda self, name: None)
