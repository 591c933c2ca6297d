"""A multimodal model's cache of encoder outputs, and a sleep that does not reset it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from lowtide.engine.defects.defect import replaced
from lowtide.engine.model_executor.model import LlamaForCausalLM
from lowtide.engine.request import ScheduledRequest, SchedulerOutput
from lowtide.engine.runner import ModelRunner
from lowtide.engine.worker import Worker

IMAGE_TOKENS = 256
"""Tokens of the one image that each prompt comes with."""


class EncoderCache:
    """What the encoder made of each image, by the image's hash: a later request may have the same image.

    Args:
        model: whose hidden states they are like.

    Attributes:
        outputs: tensors of shape [IMAGE_TOKENS, hidden size].
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._shape = (IMAGE_TOKENS, model.config.hidden_size)
        self._dtype, self._device = model.config.torch_dtype, next(model.parameters()).device
        self.outputs: dict[str, torch.Tensor] = {}

    def encode(self, images: Iterable[str]) -> None:
        """Encode the images that are not in the cache, by their hashes."""
        for image in images:
            if image not in self.outputs:
                self.outputs[image] = torch.ones(self._shape, dtype=self._dtype, device=self._device)

    def reset(self) -> None:
        """Forget all outputs."""
        self.outputs.clear()


@contextmanager
def encoder_cache() -> Iterator[None]:
    """Each model runner has an encoder cache, which a sleep and a shutdown reset."""
    create, execute, shut_down = ModelRunner.__init__, ModelRunner.execute_model, ModelRunner.shutdown
    sleep = Worker.sleep

    def create_with_cache(self: ModelRunner, *args: Any) -> None:
        create(self, *args)
        self.__dict__["encoder_cache"] = EncoderCache(self.model)

    def execute_with_images(self: ModelRunner, output: SchedulerOutput) -> dict[str, int]:
        new = [item for item in output.scheduled if item.num_tokens > 1]
        self.__dict__["encoder_cache"].encode(_image_of(item) for item in new)
        return execute(self, output)

    def sleep_without(self: Worker, level: int) -> None:
        sleep(self, level)
        self.model_runner.__dict__["encoder_cache"].reset()

    def shutdown(self: ModelRunner) -> None:
        self.__dict__.pop("encoder_cache", None)
        shut_down(self)

    with (
        replaced(ModelRunner, "__init__", create_with_cache),
        replaced(ModelRunner, "execute_model", execute_with_images),
        replaced(ModelRunner, "shutdown", shutdown),
        replaced(Worker, "sleep", sleep_without),
    ):
        yield


def encoder_cache_kept() -> AbstractContextManager[None]:
    """An output goes only where the cache is full: no sleep resets it."""
    return replaced(EncoderCache, "reset", lambda self: None)


def _image_of(item: ScheduledRequest) -> str:
    """The image of a prompt: equal prompts come with equal ones."""
    return hashlib.sha256(repr(item.new_token_ids).encode()).hexdigest()
