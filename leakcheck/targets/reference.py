"""The reference engine as something that can be driven: through fixed lives, by the fuzzer and by the fault sweep.

Its core is in this process or in one of its own; its weights are random, or in the shards of a small checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import distributed

from lowtide.engine import EngineConfig, EngineError, EngineState, EngineStateError, LLMEngine, SamplingParams
from lowtide.engine.config import PRESETS, load_model_config
from lowtide.engine.core_process import CoreProcess
from lowtide.engine.defects import replaced
from lowtide.engine.device_allocator.memory import HostBuffer, TransferRing
from lowtide.engine.errors import OutOfMemoryError
from lowtide.engine.kv.kv_offload import OffloadingConnector
from lowtide.engine.model_executor import weights as checkpoint
from lowtide.engine.model_executor.weights import (
    INDEX_FILE,
    RandomWeights,
    WeightSource,
    create_weight_source,
    parameter_shapes,
)
from lowtide.engine.pages.card import VmmPages
from lowtide.engine.pages.cpu import CpuPages
from lowtide.engine.processes import RemoteError, describe_error, restore_error
from lowtide.engine.weight_transfer import FileMemory, checksum
from lowtide.leakcheck.resources.orphaned_files import OwnSegments
from lowtide.leakcheck.targets.faults import (
    DamagedShardError,
    Injection,
    Kind,
    Passed,
    Pause,
    Seam,
    ShardSeam,
    injecting,
)
from lowtide.leakcheck.targets.target import Capabilities, Subjected, TargetSource
from lowtide.reports.schema import NotMeasured

if TYPE_CHECKING:
    from lowtide.engine.defects import Defect
    from lowtide.engine.kv.kv_cache import KVCacheUsage


PROMPT_LENGTHS = (5, 17, 33, 64, 64, 100, 120, 150)
"""Tokens of the prompts of `lowtide run`."""

MAX_TOKENS = 32

ENTERED = f"{__name__}:followed"
"""What the core's process enters, as `EngineConfig.process_extensions` has it; its argument is the file's path."""

SMALL: Mapping[str, Any] = {"max_num_seqs": 4, "max_model_len": 128, "dtype": "float64"}
"""Settings of every engine that is fuzzed.  In float64, because then the order of additions, which depends on what else
is in a batch, does not decide between two tokens."""

CHOICES: Mapping[str, Sequence[Any]] = {
    "block_size": (16, 8),
    "num_blocks": (24, 16),
    "max_num_batched_tokens": (64, 16),
    "enable_prefix_caching": (True, True, True, False),
    "num_micro_batches": (1, 2),
    "keep_host_copy": (True, False),
    "poison_pages": (True, False),
    "kv_offload_bytes": (0, 1 << 20),
    "kv_transport_bytes": (0, 1 << 20),
    "async_scheduling": (False, True),
    # These make a life several times as long, so they come less often.
    "process_group": (*[False] * 7, True),
    "freeze_heap": (*[False] * 15, True),
}
"""What lives differ in besides; the first value is the simplest."""

THOROUGH: Mapping[str, Any] = {
    "num_micro_batches": 2,
    "kv_offload_bytes": 1 << 20,
    "kv_transport_bytes": 1 << 20,
    "process_group": True,
}
"""The settings with which most can fail."""

ON_CARD: Mapping[str, Sequence[Any]] = {"cuda_graphs": (False, True)}


class _Reference:
    """The reference engine as a target, however it is configured.

    Args:
        config: of the first engine, and of those with other settings but for these.
        capabilities: what is driven of it.
    """

    def __init__(self, config: EngineConfig, capabilities: Capabilities) -> None:
        self._capabilities = capabilities
        self._config = config
        self._model = load_model_config(config)
        self.engine = LLMEngine(config)

    @property
    def capabilities(self) -> Capabilities:
        """What is driven of it."""
        return self._capabilities

    def preserved(self) -> Mapping[str, torch.Tensor]:
        """Return what must survive a sleep, by name."""
        return self.engine.preserved_tensors()

    def graph_buffers(self) -> Mapping[str, tuple[int, int]]:
        """Return address and bytes of what captured graphs read, by name."""
        return self.engine.graph_addresses()

    def weights(self) -> Mapping[str, int]:
        """Return the checksums of what the engine has, by name."""
        return self.engine.weight_checksums()

    def shutdown(self) -> None:
        """Shut the engine down."""
        self.engine.shutdown()

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        """Greedy tokens of each prompt."""
        outputs = self.engine.generate([self._prompt(length) for length in prompt_lengths], _greedy(max_tokens))
        return [output.token_ids for output in outputs]

    def start(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[str]:
        """Queue requests for `step`."""
        return [self.engine.add_request(self._prompt(length), _greedy(max_tokens)) for length in prompt_lengths]

    def step(self) -> Mapping[str, Sequence[int]]:
        """Make one step of the engine."""
        return {output.request_id: output.token_ids for output in self.engine.step() if output.finished}

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests."""
        self.engine.abort(request_ids)

    def sleep(self, level: int, mode: str) -> Mapping[str, Sequence[int]]:
        """Put the engine to sleep; what it aborts is no output."""
        outputs = self.engine.sleep(level, mode)  # type: ignore[arg-type]
        return {output.request_id: output.token_ids for output in outputs if output.finish_reason != "abort"}

    def wake(self, tags: Sequence[str] | None) -> None:
        """Wake it."""
        self.engine.wake(tags)

    def reset_prefix_cache(self) -> bool:
        """Forget all prefixes."""
        return self.engine.reset_prefix_cache()

    def reload(self) -> None:
        """Draw the weights again."""
        self.engine.reload_weights()

    def update_weights(self, version: int) -> Mapping[str, int]:
        """Send the engine its own weights as version 0, random ones of another seed as version 1; keeps none.

        Return the checksum of each parameter, by name.
        """
        sent: dict[str, int] = {}

        def checked() -> Iterator[tuple[str, torch.Tensor]]:
            for name, parameter in self._source_of(version).parameters(self._model.torch_dtype, self._config.device):
                sent[name] = checksum(parameter)
                yield name, parameter
                del parameter

        self.engine.update_weights(checked())
        if self._config.device != "cpu" and self._config.engine_process:
            # What a trainer has cached is none of the engine's, whose sleep and shutdown do not reach this process.
            torch.cuda.empty_cache()
        return sent

    def _source_of(self, version: int) -> WeightSource:
        if version:
            return RandomWeights(self._model, self._config.seed + version)
        return create_weight_source(self._config, self._model)

    def kv_usage(self) -> KVCacheUsage | None:
        """Return who has the KV blocks; None where there are none."""
        alive = self.engine.state in (EngineState.RUNNING, EngineState.ASLEEP)
        return self.engine.kv_cache_usage() if alive else None

    def _prompt(self, length: int) -> list[int]:
        # Prompts of lengths that are both odd, or both even, begin alike: prefixes are shared.
        source = random.Random(self._config.seed + length % 2)
        return [source.randrange(self._model.vocab_size) for _ in range(length)]


class FixedReference(_Reference):
    """The reference engine in one configuration, as `lowtide run` drives it: a new one for each life.

    Args:
        config: of the engine.
        prompt_scale: how many times as long as usual the prompts are.
    """

    def __init__(self, config: EngineConfig, prompt_scale: int = 1) -> None:
        capabilities = Capabilities(
            device=config.device,
            prompt_lengths=tuple(length * prompt_scale for length in PROMPT_LENGTHS),
            max_requests=len(PROMPT_LENGTHS),
            max_tokens=MAX_TOKENS,
            unfinished=True,
            sleep_levels=(1, 2),
            preserving_levels=(1, 2),
            emptying_levels=(2,),
            prefix_cache=True,
            update_weights=True,
        )
        # What nobody writes again after a wake must not pass for the zeros that it may have been.
        super().__init__(replace(config, poison_pages=True), capabilities)

    def create(self, config: Mapping[str, Any]) -> None:
        """Create the engine."""
        self.engine.create()


def reference_seams(device: str) -> Sequence[Seam | ShardSeam]:
    """Return those of an engine on a device."""
    pages = CpuPages if device == "cpu" else VmmPages
    # None of these may fail, but Ctrl-C comes when it comes.
    gives_back = (
        (pages, "unmap"),
        (pages, "unpin"),
        (HostBuffer, "close"),
        (TransferRing, "close"),
        (distributed, "destroy_process_group"),
    )
    return (
        Seam("reserve", pages, "reserve", lambda what: OutOfMemoryError(f"no address range ({what} injected)")),
        Seam("reserve", HostBuffer, "__init__", lambda what: OutOfMemoryError(f"no host memory ({what} injected)")),
        Seam("reserve", FileMemory, "__init__", lambda what: OutOfMemoryError(f"no bucket ({what} injected)")),
        Seam("map", pages, "map", lambda what: OutOfMemoryError(f"no room ({what} injected)")),
        Seam("pin", pages, "pin", lambda what: OutOfMemoryError(f"no memory can be locked ({what} injected)")),
        Seam("transfer", OffloadingConnector, "_copy", lambda what: RuntimeError(f"copy failed ({what} injected)")),
        Seam("transfer", TransferRing, "_drain", lambda what: RuntimeError(f"copy failed ({what} injected)")),
        Seam("transfer", TransferRing, "_fill", lambda what: RuntimeError(f"copy failed ({what} injected)")),
        Seam("collective", distributed, "init_process_group", _timeout),
        Seam("collective", distributed, "new_group", _timeout),
        ShardSeam(checkpoint, "open_safetensors"),
        *(Seam("interrupt", owner, name, KeyboardInterrupt) for owner, name in gives_back),
    )


def _timeout(what: str) -> BaseException:
    return distributed.DistBackendError(f"{what}: the other ranks did not come ({what} injected)")


class Armed(msgspec.Struct, frozen=True):
    """What is to fail in a call.

    Attributes:
        call: distinguishes it from an earlier call's.
        kind: of the fault point.
        at: which one, from 0 on; None only counts.
        device: where the engine has its memory.
        points: how many there are, for a process that is to stand still there; None to let it fail.
    """

    call: str
    kind: Kind
    at: int | None
    device: str
    points: int | None = None


class FaultReport(msgspec.Struct, frozen=True):
    """What became of it so far.

    Attributes:
        passed: the points of that kind that were passed.
        raised: what was raised; None before.
        shard: the damaged shard that stands for it.
    """

    passed: list[Passed]
    raised: RemoteError | None = None
    shard: str | None = None


@contextmanager
def injecting_in_core(path: Path, injection: Injection, device: str) -> Iterator[Injection]:
    """Lead fault points in the core's process to `injection` while it lasts."""
    points = injection.points if isinstance(injection, Pause) else None
    armed = Armed(os.urandom(8).hex(), injection.kind, injection.at, device, points)
    _write(path, armed)
    try:
        yield injection
    finally:
        path.unlink(missing_ok=True)
        answer = _report_beside(path)
        with suppress(FileNotFoundError):
            report = msgspec.json.decode(answer.read_bytes(), type=FaultReport)
            injection.passed, injection.is_elsewhere = report.passed, True
            if report.shard is not None:
                injection.raised = DamagedShardError(report.shard)
            elif report.raised is not None:
                injection.raised = restore_error(report.raised, "the engine's core")
            answer.unlink()


@contextmanager
def followed(path: str) -> Iterator[None]:
    """Follow each order, in the core's process, with the faults that the file asks for."""
    follow = CoreProcess.follow
    made = OwnSegments()
    made.start()
    injections: dict[str, Injection] = {}

    def follow_with_faults(self: CoreProcess, name: str, arguments: Sequence[Any]) -> object:
        try:
            armed = msgspec.json.decode(Path(path).read_bytes(), type=Armed)
        except FileNotFoundError:
            return follow(self, name, arguments)
        injection = injections.get(armed.call) or _make_injection(armed, made)
        injections.clear()
        injections[armed.call] = injection
        try:
            with injecting(injection, reference_seams(armed.device), device=armed.device):
                return follow(self, name, arguments)
        finally:
            # Threads of the engine's that are at a fault point by now pass it.
            at, injection.at = injection.at, None
            _write(_report_beside(Path(path)), _report_of(injection))
            injection.at = at

    try:
        with replaced(CoreProcess, "follow", follow_with_faults):
            yield
    finally:
        made.stop()


def _make_injection(armed: Armed, made: OwnSegments) -> Injection:
    if armed.points is None or armed.at is None:
        return Injection(armed.kind, armed.at)
    return Pause(armed.kind, armed.at, made, armed.points)


def _report_of(injection: Injection) -> FaultReport:
    if isinstance(injection.raised, DamagedShardError):
        return FaultReport(injection.passed, shard=injection.raised.shard)
    return FaultReport(injection.passed, None if injection.raised is None else describe_error(injection.raised))


def _report_beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.report")


def _write(path: Path, content: msgspec.Struct) -> None:
    """Write it whole or not at all: the other process may read at any time."""
    draft = path.with_name(f"{path.name}.draft")
    draft.write_bytes(msgspec.json.encode(content))
    draft.replace(path)


class ReferenceTarget(_Reference):
    """The reference engine with a small random model.

    Args:
        device: "cpu" or "cuda:N".
        settings: of every engine, over `SMALL` and `CHOICES`.
        prompt_scale: how many times as long as usual the prompts are.
    """

    def __init__(self, device: str = "cpu", settings: Mapping[str, Any] | None = None, prompt_scale: int = 1) -> None:
        self._settings = {"device": device, **SMALL, **(settings or {})}
        self._faults = Path(tempfile.gettempdir()) / f"lowtide-faults-{os.getpid()}-{os.urandom(4).hex()}"
        if self._settings.get("engine_process"):
            extensions = (*self._settings.get("process_extensions", ()), f"{ENTERED}={self._faults}")
            self._settings["process_extensions"] = extensions
        choices = {**CHOICES, **({} if device == "cpu" else ON_CARD)}
        if prompt_scale > 1:
            # Then the sizes are those that the settings give.
            sizes = ("num_blocks", "block_size", "kv_offload_bytes")
            choices = {name: values for name, values in choices.items() if name not in sizes}
            for name in ("max_model_len", "max_num_batched_tokens"):
                self._settings.pop(name, None)
                choices.pop(name, None)
        capabilities = Capabilities(
            device=device,
            configs={name: values for name, values in choices.items() if name not in (settings or {})},
            prompt_lengths=tuple(length * prompt_scale for length in (3, 17, 40)),
            unfinished=True,
            sleep_levels=(1, 2),
            sleep_modes=("wait", "abort"),
            preserving_levels=(1, 2),
            emptying_levels=(2,),
            wake_tags=("weights", "kv_cache"),
            prefix_cache=True,
            reload=True,
            update_weights=True,
            keeping_levels=(1,),
            illegal_call=EngineStateError,
            failure=(EngineError, OutOfMemoryError),
        )
        super().__init__(EngineConfig(**self._settings), capabilities)

    def create(self, config: Mapping[str, Any]) -> None:
        """Make a new engine, unless there is one."""
        if self.engine.state in (EngineState.NEW, EngineState.CLOSED):
            settings = {**self._settings, **config}
            if settings.get("cuda_graphs"):
                # Graphs are captured for one micro-batch.
                settings["num_micro_batches"] = 1
            if settings.get("tensor_parallel_size", 1) > 1 or not settings.get("enable_prefix_caching", True):
                # Ranks do not offload, and a block on the host is found by its prefix alone.
                settings["kv_offload_bytes"] = 0
            if settings.get("tensor_parallel_size", 1) > 1 or settings.get("kv_offload_bytes"):
                settings["async_scheduling"] = False
            self.engine = LLMEngine(EngineConfig(**settings))
        self.engine.create()

    def state(self) -> str:
        """Return the engine's own word for its state."""
        return self.engine.state.value

    def pages(self) -> Mapping[str, int] | None:
        """Return the bytes with pages by arena tag, as the engine counts them in its other processes; None without."""
        config = self.engine.config
        return self.engine.memory_mapped() if config.engine_process or config.tensor_parallel_size > 1 else None

    def injecting(self, injection: Injection) -> AbstractContextManager[Injection] | None:
        """Let something fail in the core's process; None where the core has none of its own."""
        if not self.engine.config.engine_process:
            return None
        return injecting_in_core(self._faults, injection, self._settings["device"])

    def fault_seams(self) -> Sequence[Seam | ShardSeam]:
        """Return the places outside torch's operators at which the engine can fail."""
        return reference_seams(self._settings["device"])


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def reference(device: str = "cpu") -> ReferenceTarget:
    """Return the reference engine, as the fuzzer drives it."""
    return ReferenceTarget(device)


class SmallCheckpoint:
    """A folder that is there for as long as this is entered; needs the package `safetensors`.

    Attributes:
        folder: the checkpoint's.
    """

    def __init__(self) -> None:
        self._kept: tempfile.TemporaryDirectory[str] | None = None
        self.folder = ""

    def __enter__(self) -> SmallCheckpoint:
        """Write it."""
        self._kept = tempfile.TemporaryDirectory(prefix="lowtide-checkpoint-")
        self.folder = self._kept.name
        _write_checkpoint(Path(self.folder))
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Delete it."""
        if self._kept is not None:
            self._kept.cleanup()


def _write_checkpoint(folder: Path) -> None:
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


def reference_target(device: str, defect: Defect | None, shape: Mapping[str, Any] | None = None) -> Subjected:
    """Return the reference engine, with a historical bug or without.

    Args:
        device: "cpu" or "cuda:N".
        defect: the bug.
        shape: settings that say in how many processes the engine is.

    Raises:
        ConfigError: the bug cannot show on this device.
    """
    imports = ["from lowtide.leakcheck.reference_target import ReferenceTarget"]
    own = dict(shape or {})
    if defect is None:
        make = f"lambda: ReferenceTarget({device!r}{f', {own!r}' if own else ''})"
        factory = lambda: ReferenceTarget(device, own)  # noqa: E731
        return Subjected("reference", factory, TargetSource(imports, make), nullcontext(), thorough=THOROUGH)
    defect.check(device)
    settings = {**own, **defect.settings}
    if settings.get("engine_process") or settings.get("tensor_parallel_size", 1) > 1:
        # The processes that the engine starts get the bug too.
        own["process_extensions"] = (defect.extension("activated"),)
    imports += ["from lowtide.engine.defects import DEFECTS", f"known = DEFECTS[{defect.name!r}]"]
    written = f"{own!r} | known.settings" if own else "known.settings"
    scale = ", known.prompt_scale" if defect.prompt_scale != 1 else ""
    make = f"lambda: ReferenceTarget({device!r}, {written}{scale})"
    return Subjected(
        f"reference with {defect.name}",
        lambda: ReferenceTarget(device, {**own, **defect.settings}, defect.prompt_scale),
        TargetSource(imports, make, "known.activate()"),
        # Not with what makes it show from outside: that is for the search to find.
        defect.activate(),
        thorough={name: value for name, value in THOROUGH.items() if name not in defect.settings},
    )


def checkpoint_target(device: str, shape: Mapping[str, Any] | None = None) -> Subjected:
    """Return the reference engine with its weights in the shards of a checkpoint, which can be damaged."""
    own = dict(shape or {})
    plain = reference_target(device, None, own)
    if find_spec("safetensors") is None:
        why = 'the package safetensors is not installed: pip install "lowtide[models]"'
        return replace(plain, not_measured=(NotMeasured(what="damaged shards", why=why),))
    written = SmallCheckpoint()
    imports = [
        "from lowtide.leakcheck.reference_target import ReferenceTarget",
        "from lowtide.leakcheck.small_checkpoint import SmallCheckpoint",
    ]
    make = f"lambda: ReferenceTarget({device!r}, {own!r} | {{'model': written.folder}})"
    return Subjected(
        "reference",
        lambda: ReferenceTarget(device, {**own, "model": written.folder}),
        TargetSource(imports, make, "SmallCheckpoint() as written"),
        written,
        plain.source,
        THOROUGH,
    )
