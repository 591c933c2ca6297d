"""The `tiny` model as a checkpoint folder with two shards, for what can go wrong with shards."""

from __future__ import annotations

import json
import tempfile
from importlib import import_module
from pathlib import Path

import torch

from lowtide.engine.config import PRESETS
from lowtide.engine.model_executor.checkpoint import INDEX_FILE
from lowtide.engine.model_executor.weights import RandomWeights, parameter_shapes


class SmallCheckpoint:
    """A folder that is there for as long as this is entered; needs the package `safetensors`.

    Attributes:
        folder: the checkpoint's.
    """

    def __init__(self) -> None:
        self._kept: tempfile.TemporaryDirectory[str] | None = None
        self.folder = ""

    def __enter__(self) -> SmallCheckpoint:
        """Writes it."""
        self._kept = tempfile.TemporaryDirectory(prefix="lowtide-checkpoint-")
        self.folder = self._kept.name
        _write(Path(self.folder))
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Deletes it."""
        if self._kept is not None:
            self._kept.cleanup()


def _write(folder: Path) -> None:
    model = PRESETS["tiny"]
    weights = {name: torch.empty(shape) for name, shape in parameter_shapes(model).items()}
    RandomWeights(model, seed=0).fill(weights)
    names = list(weights)
    shards = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    save = import_module("safetensors.torch").save_file
    for file, held in shards.items():
        save({name: weights[name] for name in held}, str(folder / file))
    shard_of = {name: file for file, held in shards.items() for name in held}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": shard_of}))
    config = {
        "architectures": [model.architecture],
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
