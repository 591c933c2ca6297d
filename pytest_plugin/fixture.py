"""The fixture `leakcheck`: stages and checks inside a test, and the stages of somebody else's engine."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.pytest_plugin.checker import Checker
    from lowtide.reports.schema import Finding


class Leakcheck:
    """What a test gets as `leakcheck`; without `--leakcheck` its stages and checks do nothing.

    Args:
        checker: of this run; None where it is off.
    """

    def __init__(self, checker: Checker | None) -> None:
        self._checker = checker

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Attribute what appears in the block to stage `name`."""
        with contextlib.ExitStack() as stack:
            if self._checker is not None:
                stack.enter_context(self._checker.stage(name))
            yield

    def check(self) -> tuple[Finding, ...]:
        """Everything that the test made since its call began must be back now, except what it still holds on purpose.

        Local variables of the test hold what they name: delete them first.

        Returns:
            What did not come back; empty where it is off.

        Raises:
            LeakFailure: something did not, and a leak fails.
        """
        return () if self._checker is None else self._checker.check()

    def engine(
        self,
        engine: Any,
        *,
        create: str | None = None,
        infer: str | None = None,
        sleep: str | None = None,
        wake: str | None = None,
        update_weights: str | None = None,
        shutdown: str | None = None,
    ) -> Any:
        """Return the engine, with each of the named methods as a stage: `leakcheck.engine(llm, infer="generate")`.

        Args:
            engine: any object; it is not changed.
            create: the method that takes memory.
            infer: the method that generates.
            sleep: the method that gives memory back for a while.
            wake: the method that takes it again.
            update_weights: the method by which a trainer's weights come; what each call leaves is growth.
            shutdown: the method that gives all of it back.

        Returns:
            A stand-in with the same attributes. Drop it, too, to let go of the engine.

        Raises:
            LeakcheckUsageError: the engine has no such method.
        """
        names = {"create": create, "infer": infer, "sleep": sleep, "wake": wake}
        names |= {"update_weights": update_weights, "shutdown": shutdown}
        methods = {method: name for name, method in names.items() if method is not None}
        for method, name in methods.items():
            if not callable(getattr(engine, method, None)):
                raise LeakcheckUsageError(
                    f"leakcheck.engine({name}={method!r}): {type(engine).__name__} has no method {method!r}; "
                    f"it has {', '.join(_public_methods(engine)) or 'none that is public'}"
                )
        stage = self.stage if self._checker is None else functools.partial(self._checker.stage_of, engine)
        return StagedEngine(engine, methods, stage)


class LeakcheckUsageError(TypeError):
    """The fixture was used in a way that cannot work; the message says what would."""

    def __init__(self, message: str) -> None:
        # Not before there is something to say: a session that judges nothing loads nothing.
        from lowtide.reports.escaping import one_line

        super().__init__(one_line(message))


class StagedEngine:
    """Stands in for an engine: some of its methods run as stages, everything else is the engine's own.

    Args:
        engine: the engine.
        methods: stage by method name.
        stage: makes a stage of a name.
    """

    def __init__(
        self,
        engine: Any,
        methods: dict[str, str],
        stage: Callable[[str], contextlib.AbstractContextManager[None]],
    ) -> None:
        # Set past `__setattr__`, which hands on to the engine.
        vars(self).update(_engine=engine, _methods=methods, _stage=stage)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._engine, name)
        if name not in self._methods:
            return value

        def staged(*args: Any, **kwargs: Any) -> Any:
            with self._stage(self._methods[name]):
                return value(*args, **kwargs)

        return staged

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._engine, name, value)


def _public_methods(engine: object) -> list[str]:
    return [name for name in dir(type(engine)) if not name.startswith("_") and callable(getattr(type(engine), name))][
        :20
    ]
