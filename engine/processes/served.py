"""What a process of the engine does: it has one object, whose methods its client calls, until it is shut down."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar

import msgspec

from lowtide.engine.errors import ConfigError, EngineDeadError, EngineStateError
from lowtide.engine.processes.channel import Answer, Connection, Order, Signatures, describe_error
from lowtide.engine.teardown import release_frames
from lowtide.probes.stages import stage


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
                arguments = self.signatures[order.name].arguments(order)
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
    """All of these are active while the context lasts.

    Each is `module:function=argument`: the function is called with the argument, a string, and returns a context
    manager.  A `ConfigError` where there is no such function.
    """
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
