"""Reads Hugging Face checkpoint folders: which file holds which tensor, whether they fit, and the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from lowtide.engine.errors import CheckpointError, ConfigError
from lowtide.engine.model_executor.tensor_parallel import Shard

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_SUPPORTED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class _Index(msgspec.Struct):
    """model.safetensors.index.json: which shard holds which tensor."""

    weight_map: dict[str, str]


def locate_tensors(folder: str | Path, names: Mapping[str, tuple[int, ...]]) -> dict[Path, list[str]]:
    """Which file of a checkpoint folder holds which of the tensors `names`; reads headers only.

    Args:
        folder: with `model.safetensors`, or with `model.safetensors.index.json` and its shards.
        names: expected shape of each tensor. What the folder holds besides them is of no concern.

    Returns:
        The tensors' names by file.

    Raises:
        CheckpointError: a file is missing, cut short or damaged, or a tensor is missing, misshapen or of a dtype that
            is not float32, float16 or bfloat16; names the file and the tensor.
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
    try:
        shard_of = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error}") from error
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
    """Copies tensors of safetensors files in place into `parameters`, cast to each parameter's dtype.

    Files are opened one after the other and closed again; no more than one tensor is held besides the parameters.

    Args:
        files: the tensors' names by file.
        parameters: to be filled, by name.
        shards: which part of each tensor its parameter is.

    Raises:
        CheckpointError: a file cannot be read, or a tensor in it has another shape than its parameter: it was another
            file when it was checked, and `copy_` would broadcast it without a word.
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
    """A safetensors file, open for reading and closed at the end; its errors come out as `CheckpointError`."""
    safetensors = _optional_import("safetensors")
    try:
        with safetensors.safe_open(str(path), framework="pt", device="cpu") as file:
            yield file
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors (cut short or damaged): {error}") from error


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder; None when it has no tokenizer.json.

    Raises:
        ConfigError: the package `tokenizers` is not installed.
        CheckpointError: tokenizer.json is damaged.
    """
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
