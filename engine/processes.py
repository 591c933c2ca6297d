"""An object in another process of the engine: the connection to it, who answers there, who starts it and calls it.

A socket alone does not show that its other end is dead: any process that was forked meanwhile holds a copy of it. So
each side also watches the other process itself, by a pidfd (Linux 5.3), which becomes readable as that process ends.
"""

from __future__ import annotations

import builtins
import importlib
import os
import pkgutil
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from types import FrameType, GenericAlias
from typing import Any, ClassVar, TypeVar, get_type_hints

import msgspec
import torch

from lowtide.engine import errors
from lowtide.engine.errors import ChannelError, ConfigError, EngineDeadError, EngineError, EngineStateError
from lowtide.engine.teardown import Teardown, WhenDropped, add_notes, release_frames
from lowtide.probes.stages import stage

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

MOST_BYTES = 1 << 30
"""Bytes of one message, at most."""

_HEADER = struct.Struct("!Q")

_Message = TypeVar("_Message")
_Result = TypeVar("_Result")


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


END_S = 10.0
"""Seconds that a process may take to end by itself once its connection is closed, before it is killed."""

# Not `-m`: the child finds modules where its parent finds them, also those of a path that was set at run time.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1].split('\\n'); from lowtide.engine.processes import main; main(sys.argv[2:])"
)


class ChildProcess:
    """A Python process that runs one function with a connection to this process, and ends with this process.

    It ends when this process has ended in whatever way (`kill -9` too), when the connection is closed, and when its
    object is collected or this interpreter exits.

    The function `entry`, a `module:function`, is called with the child's `Connection`. Messages call it by its `label`.
    """

    def __init__(self, entry: str, name: str, label: str = "", env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.answer = Answer()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        own = ("\n".join(sys.path), str(theirs.fileno()), str(os.getpid()), entry, name)
        with theirs:
            try:
                self._process = _start(own, theirs.fileno(), {**os.environ, **(env or {})})
            except BaseException:
                ours.close()
                raise
        self.label = f"{label or name} (pid {self.pid})"
        try:
            self.connection = Connection(ours, self.pid, name)
        except BaseException:
            ours.close()
            _end(self._process, None, os.getpid(), 0.0)
            raise
        # What nobody ends must end with its owner, and at the interpreter's exit.
        self._dropped = WhenDropped(self, _end, self._process, self.connection, os.getpid(), END_S, at_exit=True)

    @property
    def pid(self) -> int:
        """Its process identifier."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def error(self) -> BaseException:
        """Return what its last order has failed with."""
        assert self.answer.error is not None
        return restore_error(self.answer.error, self.label)

    def end(self, timeout_s: float = END_S) -> None:
        """Close the connection, wait for the process's end, and kill it after `timeout_s`; again it does nothing."""
        if self._dropped.cancel():
            _end(self._process, self.connection, os.getpid(), timeout_s)

    def death(self) -> EngineDeadError:
        """Return the error for a process that is gone, with how it ended; it is reaped, and killed if it lives."""
        self.end(timeout_s=1.0)
        return EngineDeadError(f"{self.name} (pid {self.pid}) has ended: {describe_exit(self._process.returncode)}")


def _start(arguments: Sequence[str], descriptor: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    process = None
    try:
        with HeldInterrupt() as held:
            # Else an interrupt would end the new process with a traceback of its imports. Blocked in this thread alone;
            # another one may receive it for this one.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, *arguments],
                    pass_fds=(descriptor,),
                    stdin=subprocess.DEVNULL,
                    env=env,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        held.deliver()
    except BaseException:
        if process is not None:
            _end(process, None, os.getpid(), 0.0)
        raise
    return process


def describe_exit(code: int | None) -> str:
    """Return how a process ended, in words."""
    if code is None:
        return "nobody knows how"
    if code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"
    return f"exit code {code}"


def _end(process: subprocess.Popen[bytes], connection: Connection | None, owner: int, timeout_s: float) -> None:
    if connection is not None:
        connection.close()
    if os.getpid() != owner:
        # A fork of the owner has a copy of all this, and the process is not its own to end.
        return
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


PARENT_ENDED = 3
"""Exit code of a process whose parent ended first."""


def main(arguments: Sequence[str]) -> None:
    """Run a function until it returns; the arguments are those that `ChildProcess` gives, but for the first."""
    descriptor, parent, entry, name = arguments
    set_process_name(name)
    try:
        end_with(int(parent))
        connection = Connection(socket.socket(fileno=int(descriptor)), int(parent), "the engine's client")
    except EngineDeadError:
        os._exit(PARENT_ENDED)
    module, _, function = entry.partition(":")
    run: Callable[..., Any] = getattr(importlib.import_module(module), function)
    # SIGINT is blocked until the function has said what it does here: one that comes earlier is not lost to it.
    try:
        run(connection)
    finally:
        connection.close()


def on_interrupt(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    """Say what Ctrl-C does in this process, also one that has come since its start; until then it is blocked."""
    signal.signal(signal.SIGINT, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def end_with(parent: int) -> None:
    """End this process at once when its parent has ended, whatever its main thread does; errors as `Connection`."""
    pidfd = watch_process(parent, "the parent")
    if os.getppid() != parent:
        raise EngineDeadError(f"the parent (pid {parent}) has ended")

    def watch() -> None:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        while not poll.poll():
            pass
        parent_has_ended()

    threading.Thread(target=watch, name="lowtide-parent-watch", daemon=True).start()


def parent_has_ended() -> None:
    """End this process at once."""
    # Not `sys.exit`: nobody is left to whom a teardown would report, and the kernel takes all memory back.
    os._exit(PARENT_ENDED)


def set_process_name(name: str) -> None:
    """Name the process as tools show it: its title where `setproctitle` is installed, and its main thread."""
    threading.main_thread().name = name
    try:
        from setproctitle import setproctitle
    except ImportError:
        # The kernel's own name of the main thread, which `ps` and `top` show, needs no package.
        with open("/proc/self/comm", "w") as comm:  # noqa: PTH123 - no new line may be appended
            comm.write(_shortened(name))
    else:
        setproctitle(name)


def _shortened(name: str) -> str:
    """Return a name as the kernel keeps it (TASK_COMM_LEN), with what tells it from its peers: `lowtide::Wo_TP0`."""
    head, separator, tail = name.rpartition("_")
    return f"{head[: 15 - len(separator) - len(tail)]}{separator}{tail}"[:15]


SLICE_S = 0.2
"""Seconds of one wait: a signal that the kernel gave to another thread of the process does not break it off."""


class HeldInterrupt:
    """Holds SIGINT back while it is entered, but for `waiting`; elsewhere than in the main thread it does nothing.

    A `KeyboardInterrupt` between sending an order and taking its answer in would leave neither side knowing what the
    other does.
    """

    def __init__(self) -> None:
        self._has_come = False
        self._lets_through = False
        self._handler: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> HeldInterrupt:
        """Hold interrupts back from now on."""
        handler = signal.getsignal(signal.SIGINT)
        # One that is ignored, or handled below Python, raises nothing.
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Let them through again."""
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)

    def waiting(self, wait: Callable[[float], _Result], deadline: float | None = None) -> _Result:
        """Call `wait` with a time of `time.monotonic` until it returns something or the deadline has passed.

        An interrupt breaks it off, also one that was held back before.
        """
        self._lets_through = True
        try:
            if self._has_come:
                self._on_signal(signal.SIGINT, None)
            while True:
                end = time.monotonic() + SLICE_S
                end = end if deadline is None else min(end, deadline)
                result = wait(end)
                if result or end == deadline:
                    return result
        finally:
            self._lets_through = False

    def deliver(self) -> None:
        """Call the program's handler, which may raise, for an interrupt that no `waiting` has raised."""
        if self._has_come and self._handler is not None:
            self._has_come = False
            self._handler(signal.SIGINT, None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._has_come = not self._lets_through
        if self._lets_through and self._handler is not None:
            # Before the handler raises: it may do so on the way out of `waiting`.
            self._lets_through = False
            self._handler(number, frame)


STUCK_S = 5.0
"""Seconds that other processes get for their answers once one has failed: they may wait for it in a collective."""


class Client:
    """Sends orders to child processes, and takes their answers in.

    When a process ends without being asked to, or cannot be understood, all are ended: from then on each call raises
    `EngineDeadError`, and only a shutdown is of use.
    """

    def __init__(self) -> None:
        self.children: list[ChildProcess] = []
        self._owner = os.getpid()
        self._death: EngineDeadError | None = None

    @property
    def awake(self) -> bool:
        """Whether weights and KV cache have all their pages, in every process."""
        return all(child.answer.awake for child in self.children)

    def memory_mapped(self) -> dict[str, int]:
        """Return the bytes with pages behind them in all processes, by arena tag, as after the last call."""
        mapped = [child.answer.mapped for child in self.children]
        return {tag: sum(each[tag] for each in mapped) for tag in mapped[0]} if mapped else {}

    @property
    def is_usable(self) -> bool:
        """Whether calls can be made: nothing has ended, and this is no fork of the process that has begun it."""
        return self._death is None and os.getpid() == self._owner

    def _require_usable(self) -> None:
        if os.getpid() != self._owner:
            whose = self.children[0].label if self.children else "this engine"
            raise EngineDeadError(f"{whose} is of another process (pid {self._owner}), of which this is a fork")
        if self._death is not None:
            raise self._death.with_traceback(None)

    def _interrupted(self, times: int) -> float:
        """React to the interrupt of that number; the seconds that processes get. Where it raises, they are killed."""
        return STUCK_S

    def _killed(self, why: str) -> EngineDeadError:
        """Return the error for processes that are killed."""
        raise NotImplementedError

    def _exchange(
        self, orders: Mapping[ChildProcess, Order], held: HeldInterrupt
    ) -> tuple[KeyboardInterrupt | None, list[ChildProcess]]:
        """Send orders and wait for all answers; the interrupt that came meanwhile, and the processes that failed.

        An interrupt waits for the answers too: else the next call would take them for its own.
        """
        interrupts: list[KeyboardInterrupt] = []
        waiting, failed = list(orders), list[ChildProcess]()
        seconds, deadline = 0.0, None
        for child, order in orders.items():
            with self._talking_to(child):
                child.connection.send(order)
        # What is not waited for must not end meanwhile, or others could wait for it for ever.
        ends = any(order.name == "shutdown" for order in orders.values())
        while waiting:
            idle = [] if ends else [child for child in self.children if child not in waiting]
            try:
                ready = held.waiting(partial(_wait, waiting, idle), deadline)
            except KeyboardInterrupt as error:
                interrupts.append(error)
                with self._talking_to(waiting[0]):
                    seconds = self._interrupted(len(interrupts))
                deadline = time.monotonic() + seconds
                continue
            if not ready:
                cause = f"after {failed[0].label} had failed" if failed else "after an interrupt"
                silent = ", ".join(child.label for child in waiting)
                self._give_up(f"{silent} did not answer within {seconds:g} s {cause}")
                break
            for child in ready:
                if child not in waiting:
                    raise self._ended(child)
                with self._talking_to(child):
                    child.answer = child.connection.receive(Answer)
                waiting.remove(child)
                if child.answer.error is not None:
                    failed.append(child)
                    seconds, deadline = STUCK_S, time.monotonic() + STUCK_S
        return (interrupts[-1] if interrupts else None), failed

    @contextmanager
    def _talking_to(self, child: ChildProcess) -> Iterator[None]:
        try:
            yield
        except EngineDeadError as error:
            raise self._ended(child) from error
        except BaseException as error:
            # Half an order was sent, or an answer got lost: what the processes do is not known any more.
            death = self._give_up(str(error) or repr(error))
            if not isinstance(error, Exception):
                raise
            raise death from error

    def _ended(self, ended: ChildProcess) -> EngineDeadError:
        """Return the error for a process that is gone; the others are killed."""
        return self._end_all(ended.death, [child for child in self.children if child is not ended])

    def _give_up(self, why: str) -> EngineDeadError:
        """Kill all processes: what they do cannot be known any more, or will never end."""
        return self._end_all(lambda: self._killed(why), self.children)

    def _end_all(self, death: Callable[[], EngineDeadError], killed: Sequence[ChildProcess]) -> EngineDeadError:
        for child in killed:
            child.end(timeout_s=0.0)
        self._death = death()
        for child in self.children:
            # The engine's state stays what it was, and what a process has failed with is still to be raised.
            child.answer = msgspec.structs.replace(child.answer, running=0, waiting=0, mapped={})
        return self._death

    def _end(self, teardown: Teardown, timeout_s: float = 0.0) -> None:
        """Wait until nothing is left of the processes, which have so many seconds to end by themselves."""
        for child in self.children:
            teardown.run(child.label, partial(child.end, timeout_s))


def _wait(waiting: Sequence[ChildProcess], idle: Sequence[ChildProcess], deadline: float | None) -> list[ChildProcess]:
    """Return who has answered or ended, and who of the idle ones has ended; none after the deadline."""
    poll = select.poll()
    for child in waiting:
        poll.register(child.connection, select.POLLIN)
    for child in (*waiting, *idle):
        poll.register(child.connection.pidfd, select.POLLIN)
    left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
    ready = {descriptor for descriptor, _ in poll.poll(left)}
    return [child for child in (*waiting, *idle) if ready & {child.connection.fileno(), child.connection.pidfd}]
