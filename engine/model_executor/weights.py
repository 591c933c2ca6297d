"""Where the weights come from: a checkpoint folder, or seeded random numbers; both can fill the same memory again."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from lowtide.engine.config import PRESETS, EngineConfig, ModelConfig, read_json
from lowtide.engine.errors import CheckpointError, ConfigError
from lowtide.engine.model_executor.model import LlamaForCausalLM
from lowtide.engine.model_executor.parallel_layers import Shard, shard_parameter

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_SUPPORTED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class _Index(msgspec.Struct):
    """model.safetensors.index.json: which shard holds which tensor."""

    weight_map: dict[str, str]


def locate_tensors(folder: str | Path, names: Mapping[str, tuple[int, ...]]) -> dict[Path, list[str]]:
    """Return which file of a checkpoint folder holds which of the tensors, given by name and shape; reads headers only.

    A `CheckpointError` names the file that is missing or damaged, or the tensor that does not fit.
    """
    files = _files(Path(folder), names)
    for path, held in files.items():
        with open_safetensors(path) as file:
            present = set(file.keys())
            for name in held:
                if name not in present:
                    raise CheckpointError(f"{path} does not hold tensor {name}; expected shape {_said(names[name])}")
                header = file.get_slice(name)
                found = tuple(header.get_shape())
                if found != names[name]:
                    raise CheckpointError(
                        f"{path}: tensor {name} has shape {_said(found)}; config.json asks for {_said(names[name])}"
                    )
                if header.get_dtype() not in _SUPPORTED_DTYPES:
                    raise CheckpointError(
                        f"{path}: tensor {name} is of dtype {header.get_dtype()}; "
                        f"supported are {', '.join(_SUPPORTED_DTYPES.values())}"
                    )
    return files


def _files(folder: Path, names: Mapping[str, tuple[int, ...]]) -> dict[Path, list[str]]:
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        return {single: list(names)}
    if not index.is_file():
        raise CheckpointError(
            f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; give a Hugging Face checkpoint folder "
            "whose weights are saved as safetensors"
        )
    shard_of = read_json(index, _Index).weight_map
    files: dict[Path, list[str]] = {}
    for name, shape in names.items():
        if name not in shard_of:
            raise CheckpointError(f"{index} does not list tensor {name}; expected shape {_said(shape)}")
        path = folder / shard_of[name]
        if not path.is_file():
            raise CheckpointError(f"shard {path} is missing; {index.name} says that it holds tensor {name}")
        files.setdefault(path, []).append(name)
    return files


def copy_tensors(
    files: Mapping[Path, list[str]], parameters: Mapping[str, torch.Tensor], shards: Mapping[str, Shard]
) -> None:
    """Copy tensors of safetensors files in place into `parameters`, cast to each parameter's dtype.

    Files are opened one after the other, and no more than one tensor is held besides the parameters.  A
    `CheckpointError` where a tensor has another shape than when it was checked, for `copy_` would broadcast it without
    a word.
    """
    for path, names in files.items():
        with open_safetensors(path) as file:
            for name in names:
                stored, shard = file.get_slice(name), shards[name]
                found = tuple(stored.get_shape())
                if found != shard.full_shape:
                    wanted = _said(shard.full_shape)
                    raise CheckpointError(f"{path}: tensor {name} has shape {_said(found)}; the model has {wanted}")
                parameters[name].copy_(stored[shard.index])


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file for reading, closed at the end; its errors come out as `CheckpointError`."""
    safetensors = _optional_import("safetensors")
    try:
        with safetensors.safe_open(str(path), framework="pt", device="cpu") as file:
            yield file
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors (cut short or damaged): {error}") from error


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint folder; None when it has no tokenizer.json."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        return None
    tokenizers = _optional_import("tokenizers")
    try:
        tokenizer: Tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from error
    return tokenizer


def _optional_import(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f'a checkpoint folder needs the package {name}: pip install "lowtide[models]"') from error


def _said(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


class WeightSource:
    """Fills the model's parameters: when the engine is created, and again when it wakes from a level 2 sleep."""

    def __init__(self, config: ModelConfig, rank: int, size: int) -> None:
        self.shards = {
            name: shard_parameter(name, shape, rank, size) for name, shape in parameter_shapes(config).items()
        }
        """The part of every parameter that this rank has, by name."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each parameter of this rank, by its Hugging Face name."""
        return {name: shard.shape for name, shard in self.shards.items()}

    def check(self) -> None:
        """Proves, without taking memory for weights, that `fill` will find every parameter; raises otherwise."""

    def fill(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Write the parameters given in place, wherever they live; bit for bit the same each time."""
        raise NotImplementedError

    def parameters(self, dtype: torch.dtype, device: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter with its name, made when it is asked for, and kept by nobody here."""
        for name, shape in self.shapes().items():
            parameter = torch.empty(shape, dtype=dtype, device=device)
            self.fill({name: parameter})
            yield name, parameter
            del parameter


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the model, by its Hugging Face name.

    A linear layer's weight is [out, in]. A tied head has no parameter of its own. The dtype of all is `config.dtype`.
    """
    # A model without memory behind it.
    model = LlamaForCausalLM(
        config, lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype, device="meta"), torch.empty(0)
    )
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


class CheckpointWeights(WeightSource):
    """The safetensors of a Hugging Face checkpoint folder; no file stays open between calls."""

    def __init__(self, folder: str | Path, config: ModelConfig, rank: int = 0, size: int = 1) -> None:
        super().__init__(config, rank, size)
        self._folder = Path(folder)
        self._shapes = {name: shard.full_shape for name, shard in self.shards.items()}

    def check(self) -> None:
        """Read the headers of all files; `CheckpointError`: a file or tensor is missing or does not fit the model."""
        locate_tensors(self._folder, self._shapes)

    @torch.no_grad()
    def fill(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors of these parameters in place, cast to each parameter's dtype."""
        files = locate_tensors(self._folder, self._shapes)
        wanted = {path: [name for name in names if name in parameters] for path, names in files.items()}
        copy_tensors(wanted, parameters, self.shards)


class RandomWeights(WeightSource):
    """Seeded random weights: norms are ones, biases zeros, embeddings and projections normal.

    Each tensor has a generator of its own, seeded by the seed and its name, on the device where the tensor lives. So
    contents do not depend on the order of filling, and numbers are drawn in place, with no temporary memory. CPU and
    CUDA draw different numbers.

    Projections have a standard deviation of fan_in ** -0.5 (so that a layer's output is as large as its normalised
    input), embeddings 0.02: the residual stream is then made by the layers, not by the last token's embedding. Those
    of queries and keys are twice as large: otherwise attention averages over a long prompt, whatever it says. Tried
    on `tiny`: 100 greedy tokens after a prompt of 200 were 40 different ones without it, 89 with it.

    A rank that has a part of a tensor draws the whole tensor and keeps its part, so that all ranks together have the
    weights of one.
    """

    EMBEDDING_STD = 0.02
    QUERY_KEY_GAIN = 2.0

    def __init__(self, config: ModelConfig, seed: int, rank: int = 0, size: int = 1) -> None:
        super().__init__(config, rank, size)
        self._seed = seed

    @torch.no_grad()
    def fill(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Draws the parameters given in place."""
        for name in [name for name in self.shards if name in parameters]:
            self._fill_one(name, parameters[name])

    def _fill_one(self, name: str, parameter: torch.Tensor) -> None:
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith(".bias"):
            parameter.zero_()
        else:
            shard = self.shards[name]
            gain = self.QUERY_KEY_GAIN if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
            is_embedding = name == "model.embed_tokens.weight"
            std = self.EMBEDDING_STD if is_embedding else gain / math.sqrt(shard.full_shape[-1])
            # Python's own hash of a string differs from process to process.
            digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=8).digest()
            generator = torch.Generator(device=parameter.device)
            generator.manual_seed(int.from_bytes(digest, "little"))
            if shard.dim is None:
                parameter.normal_(0.0, std, generator=generator)
                return
            whole = parameter.new_empty(shard.full_shape).normal_(0.0, std, generator=generator)
            parameter.copy_(whole[shard.index])


def create_weight_source(config: EngineConfig, model: ModelConfig, rank: int = 0, size: int = 1) -> WeightSource:
    """Return what fills the weights of one rank: random numbers for a preset, else the checkpoint folder."""
    if config.model in PRESETS:
        return RandomWeights(model, config.seed, rank, size)
    return CheckpointWeights(config.model, model, rank, size)
