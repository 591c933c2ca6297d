"""Calls between two processes of the engine, over a framed connection on which neither waits for one that has ended.

A socket alone does not show that its other end is dead: any process that was forked meanwhile holds a copy of it. So
each side also watches the other process itself, by a pidfd (Linux 5.3), which becomes readable as that process ends.
"""

from __future__ import annotations

import builtins
import os
import pkgutil
import select
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import GenericAlias
from typing import Any, ClassVar, TypeVar, get_type_hints

import msgspec
import torch

from lowtide.engine import errors
from lowtide.engine.errors import ChannelError, ConfigError, EngineDeadError, EngineError, EngineStateError
from lowtide.engine.teardown import add_notes, release_frames
from lowtide.probes.stages import stage

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

MOST_BYTES = 1 << 30
"""Bytes of one message, at most."""

_HEADER = struct.Struct("!Q")

_Message = TypeVar("_Message")


class Connection:
    """Messages of msgspec over a stream socket, which it owns, to one process; one thread sends and receives.

    Its `pidfd` becomes readable as the other process ends.
    """

    def __init__(self, stream: socket.socket, peer: int, name: str) -> None:
        self.name = name
        self.peer = peer
        self._stream = stream
        self.pidfd = watch_process(peer, name)
        self._received = bytearray()
        stream.setblocking(False)

    def fileno(self) -> int:
        """Return the socket's descriptor, to wait for several connections at the same time."""
        return self._stream.fileno()

    def send(self, message: object) -> None:
        """Send anything that msgspec encodes, if the other process lives and it is not too large."""
        payload = msgspec.msgpack.encode(message)
        if len(payload) > MOST_BYTES:
            raise ChannelError(f"a message of {len(payload)} bytes for {self.name} is above the limit of {MOST_BYTES}")
        view = memoryview(_HEADER.pack(len(payload)) + payload)
        while view:
            try:
                view = view[self._stream.send(view) :]
            except BlockingIOError:
                if self._wait(select.POLLOUT) == select.POLLHUP:
                    raise self._ended() from None
            except OSError as error:
                raise self._ended() from error

    def receive(self, kind: type[_Message]) -> _Message:
        """Wait for the next message, also of a process that has ended since; `ChannelError`: it is of another type."""
        self._read_to(_HEADER.size)
        (length,) = _HEADER.unpack_from(self._received)
        if length > MOST_BYTES:
            raise ChannelError(f"{self.name} sent something that is no message of the engine")
        self._read_to(_HEADER.size + length)
        payload = bytes(self._received[_HEADER.size : _HEADER.size + length])
        del self._received[: _HEADER.size + length]
        try:
            return msgspec.msgpack.decode(payload, type=kind)
        except msgspec.DecodeError as error:
            raise ChannelError(f"{self.name} sent a message that does not belong here: {error}") from error

    def close(self) -> None:
        """Let go of the descriptors; the other process sees the end. Calling it again does nothing."""
        self._stream.close()
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def _read_to(self, size: int) -> None:
        while len(self._received) < size:
            ready = self._wait(select.POLLIN)
            try:
                part = self._stream.recv(1 << 20)
            except BlockingIOError:
                if ready == select.POLLHUP:
                    raise self._ended() from None
                continue
            except OSError as error:
                raise self._ended() from error
            if not part:
                raise self._ended()
            self._received += part

    def _wait(self, event: int) -> int:
        """Wait for the socket: its events, or POLLHUP where only the process's end has come."""
        if self.pidfd < 0:
            raise self._ended()
        poll = select.poll()
        poll.register(self._stream, event)
        poll.register(self.pidfd, select.POLLIN)
        return dict(poll.poll()).get(self._stream.fileno(), select.POLLHUP)

    def _ended(self) -> EngineDeadError:
        return EngineDeadError(f"{self.name} (pid {self.peer}) has ended, or closed its connection")


def watch_process(pid: int, name: str) -> int:
    """Return a pidfd of a process: a descriptor that becomes readable as it ends; errors as `Connection`."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise EngineDeadError(f"{name} (pid {pid}) has ended") from None
    except OSError as error:
        raise ChannelError(f"a process cannot be watched here (pidfd_open needs Linux 5.3): {error}") from error


class RemoteError(msgspec.Struct, frozen=True):
    """An exception of another process, its traceback as Python prints it; the parts of a group are such, too."""

    module: str
    name: str
    message: str
    notes: list[str]
    traceback: str
    parts: list[RemoteError]
    cause: RemoteError | None = None


def describe_error(error: BaseException) -> RemoteError:
    """Return an exception as a message has it."""
    group = isinstance(error, BaseExceptionGroup)
    return RemoteError(
        module=type(error).__module__,
        name=type(error).__qualname__,
        message=error.message if isinstance(error, BaseExceptionGroup) else str(error),
        notes=list(getattr(error, "__notes__", ())),
        # Those of a group's parts come with the parts.
        traceback="" if group else "".join(traceback.format_exception(type(error), error, error.__traceback__)),
        parts=[describe_error(part) for part in error.exceptions] if isinstance(error, BaseExceptionGroup) else [],
        cause=None if error.__cause__ is None else describe_error(error.__cause__),
    )


def restore_error(remote: RemoteError, where: str) -> BaseException:
    """Return the exception with its type, text and notes, and a note on where it was raised, as `rank 1 of 2`.

    A type that is neither the engine's nor Python's nor torch's comes as an `EngineError` that names it.
    """
    if remote.parts:
        error: BaseException = BaseExceptionGroup(remote.message, [restore_error(part, where) for part in remote.parts])
    else:
        kind = _known_type(remote.module, remote.name)
        # Not its own constructor, which may want other arguments than a text.
        error = EngineError(f"{remote.module}.{remote.name}: {remote.message}") if kind is None else kind.__new__(kind)
        if kind is not None:
            error.args = (remote.message,)
    add_notes(error, *remote.notes, f"raised in {where}")
    if remote.traceback:
        add_notes(error, f"its traceback there:\n{remote.traceback.rstrip()}")
    if remote.cause is not None:
        error.__cause__ = restore_error(remote.cause, where)
    return error


def _known_type(module: str, name: str) -> type[BaseException] | None:
    if module == torch.OutOfMemoryError.__module__ and name == torch.OutOfMemoryError.__qualname__:
        return torch.OutOfMemoryError
    source = {errors.__name__: errors, builtins.__name__: builtins}.get(module)
    kind = getattr(source, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, BaseException) else None


class Order(msgspec.Struct, frozen=True):
    """A call of a method, with its encoded arguments in the order of its parameters."""

    name: str
    arguments: msgspec.Raw


class Answer(msgspec.Struct, frozen=True):
    """What became of an order, and how the object is now.

    That is: requests that run and wait, whether all is awake, and the bytes with pages behind them by arena tag.
    """

    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    running: int = 0
    waiting: int = 0
    awake: bool = False
    mapped: dict[str, int] = {}
    error: RemoteError | None = None


class Signature:
    """The types that a method, or its `parameters` instead, takes and returns in another process, and its stage."""

    def __init__(self, stage: str | None, method: Callable[..., Any], *parameters: Any) -> None:
        self.stage = stage
        kinds = get_type_hints(method)
        result = kinds.pop("return")
        # Made once: msgspec would read the types anew for each message.
        arguments: Any = GenericAlias(tuple, parameters or tuple(kinds.values()))
        self.arguments: msgspec.msgpack.Decoder[tuple[Any, ...]] = msgspec.msgpack.Decoder(arguments)
        self.returned: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(result)


Signatures = Mapping[str, Signature]


def signatures(stages: Mapping[str | None, Sequence[Callable[..., Any]]], **others: Signature) -> Signatures:
    """Return the signatures of methods, which are given by their stages, and others beside them."""
    found = {method.__name__: Signature(stage, method) for stage, methods in stages.items() for method in methods}
    return {**found, **others}


def call(name: str, *arguments: object) -> Order:
    """Return the call of a method; msgspec's errors, and Python's, where it cannot encode an argument."""
    return Order(name, msgspec.Raw(msgspec.msgpack.encode(arguments)))


class ServedProcess:
    """The object of this process, and what becomes of the orders that come for it.

    Attributes:
        signatures: of the object's methods that may be called, of `create`, which makes it of an `EngineConfig` and
            whatever else, and of `shutdown`, after which the process ends.
    """

    signatures: ClassVar[Signatures]

    def __init__(self) -> None:
        self.served: Any = None
        self._extensions = ExitStack()
        self._is_working = False

    def create(self, *arguments: Any) -> None:
        """Make the object, and have it `served`."""
        raise NotImplementedError

    def state(self) -> tuple[int, int, bool, dict[str, int]]:
        """Return what an answer has of the object: see `Answer`, from `running` to `mapped`."""
        return 0, 0, self.served.awake, self.served.memory_mapped()

    def serve(self, connection: Connection) -> None:
        """Answer the client's orders, until it says `shutdown` or closes the connection."""
        order: Order | None = None
        while order is None or order.name != "shutdown":
            try:
                order = connection.receive(Order)
                connection.send(self.answer(order))
            except EngineDeadError:
                client_has_gone()

    def answer(self, order: Order) -> Answer:
        """Do what an order says; what it raises goes into the answer."""
        result: object = None
        error = None
        try:
            try:
                self._begin_work()
                arguments = self.signatures[order.name].arguments.decode(order.arguments)
                if order.name == "create":
                    # Before it is followed: they may change how.
                    self._extensions.enter_context(entered(arguments[0].process_extensions))
                result = self.follow(order.name, arguments)
            finally:
                # An interrupt up to here is one of the order.
                self._is_working = False
        except BaseException as raised:  # noqa: BLE001 - it is raised again in the client's process
            error = describe_error(raised)
            # The traceback's frames hold tensors, which must be gone when the client hears of the error.
            release_frames(raised, None)
        if self.served is None:
            # After a create that failed; a shutdown has left them already.
            self._extensions.close()
            return Answer(error=error)
        return Answer(msgspec.Raw(msgspec.msgpack.encode(result)), *self.state(), error)

    def _begin_work(self) -> None:
        self._is_working = True

    def follow(self, name: str, arguments: Sequence[Any]) -> object:
        """Call a method; an `EngineStateError` where there is nothing yet whose method it is."""
        of = self.signatures[name].stage
        with nullcontext() if of is None else stage(of):
            if name == "create":
                self.create(*arguments)
                return None
            if name == "shutdown":
                # Whatever its shutdown raises: the process ends next.
                served, self.served = self.served, None
                with self._extensions:
                    if served is not None:
                        served.shutdown()
                return None
            if self.served is None:
                raise EngineStateError(name, "not created", ("create", "shutdown"))
            return self.call(name, arguments)

    def call(self, name: str, arguments: Sequence[Any]) -> object:
        """Call a method of the object, which there is."""
        return getattr(self.served, name)(*arguments)


def client_has_gone() -> None:
    """End this process at once."""
    # Nobody listens any more, and other processes may be gone, for whom a teardown would wait in vain: the kernel takes
    # everything back, and children end with this process.
    os._exit(0)


@contextmanager
def entered(extensions: Sequence[str]) -> Iterator[None]:
    """Enter each `module:function=argument` while the context lasts; a `ConfigError` names one that is none."""
    with ExitStack() as stack:
        for extension in extensions:
            name, _, argument = extension.partition("=")
            try:
                make = pkgutil.resolve_name(name)
            except (ImportError, AttributeError, ValueError, TypeError) as error:
                raise ConfigError(
                    f"process extension {extension!r} cannot be loaded ({error}); name it as module:function=argument"
                ) from error
            if not callable(make):
                raise ConfigError(
                    f"process extension {extension!r} names no function; name it as module:function=argument"
                )
            stack.enter_context(make(argument))
        yield
