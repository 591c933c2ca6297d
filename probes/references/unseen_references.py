"""References that the collector does not see: of numpy, of torch's futures, of greenlets, of files of safetensors."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

from lowtide.probes.memory.capsules import keeps_exported
from lowtide.probes.objects.foreign import attribute, is_a, mro_of
from lowtide.probes.objects.listed import frame_locals, is_checkers
from lowtide.probes.objects.opened_in_c import SCANDIR
from lowtide.probes.originals import gc, loaded, sys
from lowtide.probes.references.cxx_holders import callbacks_of, storage_of_file
from lowtide.probes.references.entries import Containers

CALLBACK = "its callback"
"""What leads from a future of torch's to what it calls when it is done."""

MAPPED = "its mapped file"
"""What leads from a file that safetensors has open to the storage over all of it."""

Reader = Callable[[Any], list[object]]
"""Gives the objects that an object holds and does not show the collector; runs no foreign code."""


def untracked_kinds() -> list[type]:
    """Return the types, not tracked by the collector, whose instances may hold what is, or a descriptor."""
    numpy: Any = loaded("numpy")
    names = ("ndarray", "void", "flatiter", "nditer")
    holders = [getattr(numpy, name) for name in names if hasattr(numpy, name)]
    return [*holders, *_files_of_safetensors(), select.epoll, SCANDIR]


def _files_of_safetensors() -> list[type]:
    return [kind for kind in [getattr(loaded("safetensors"), "safe_open", None)] if kind is not None]


def readers(*, thorough: bool = False) -> dict[int, Reader]:
    """Return how to read the references that the collector does not see, by the identity of the type that has them.

    Args:
        thorough: whether reading may make Python objects of tensors that had none, which then stay.
    """
    numpy: Any = loaded("numpy")
    torch: Any = loaded("torch")
    by_type = [
        (getattr(numpy, "ndarray", None), _of_array),
        (getattr(numpy, "void", None), _base),
        (getattr(numpy, "flatiter", None), _base),
        (getattr(numpy, "nditer", None), _operands),
        (getattr(getattr(torch, "_C", None), "Future", None), _result_and_callbacks if thorough else _result),
        (getattr(getattr(torch, "jit", None), "RecursiveScriptModule", None) if thorough else None, tensors_of_script),
        (getattr(loaded("greenlet"), "greenlet", None), _of_greenlet),
    ]
    by_type += [(kind, storage_of_file) for kind in _files_of_safetensors()]
    return {id(cls): read for cls, read in by_type if cls is not None}


def reader_of(cls: type, *, thorough: bool = False) -> Reader | None:
    """Return how to read the references of a type's instances that the collector does not see; None if there are none.

    Args:
        cls: the type.
        thorough: see `readers`.
    """
    return first_reader(readers(thorough=thorough), map(id, mro_of(cls)))


def first_reader(known: Mapping[int, Reader], bases: Iterable[int]) -> Reader | None:
    """Return that of the first of a type's bases, by their identities, that has one."""
    return next((known[base] for base in bases if base in known), None)


def edge_of(holder: Any, held: object, containers: Containers | None = None) -> str | None:
    """Return what leads from an object to another that it hides from the collector, as code; None if nothing does.

    Args:
        holder: the object.
        held: the other one.
        containers: knows where arrays of objects have their items.
    """
    read = reader_of(type(holder), thorough=True)
    if read is tensors_of_script:
        return next((edge for edge, tensor in _named_tensors_of_script(holder) if tensor is held), None)
    if read is _of_array:
        if _array_member("base", holder) is held:
            return ".base"
        known = containers or Containers()
        places = ((name, _place_in(part, held, name, holder, known)) for name, part in object_parts(holder))
        return next((f"{name}{place}" for name, place in places if place is not None), None)
    if read is None or not any(item is held for item in read(holder)):
        return None
    if read is _operands:
        return f".operands[{next(place for place, item in enumerate(read(holder)) if item is held)}]"
    if read is storage_of_file:
        return MAPPED
    if read is _of_greenlet:
        return _local_of_greenlet(holder, held)
    if read is _result_and_callbacks:
        return ".value()" if any(item is held for item in _result(holder)) else CALLBACK
    return ".base"


def is_view_of(holder: Any, held: object) -> bool:
    """Return whether an object that is not tracked was made of another one: an array of its base, a tuple.

    Args:
        holder: the object.
        held: what a path leads to from it.
    """
    if gc.is_tracked(holder):
        return False
    if keeps_exported(type(holder)):
        return True
    if is_a(holder, tuple):
        return any(item is held for item in tuple.__iter__(holder))
    read = reader_of(type(holder))
    if read is _of_array:
        return _array_member("base", holder) is held
    return read is not None and any(item is held for item in read(holder))


def _array_member(name: str, array: Any) -> Any:
    """Return an attribute of an array as numpy itself has it: a subclass may have another one of that name."""
    return loaded("numpy").ndarray.__dict__[name].__get__(array)


def _of_array(array: Any) -> list[object]:
    base = _array_member("base", array)
    if base is not None:
        # Its items, if it has any, are the base's.
        return [base]
    return [item for _, part in object_parts(array) for item in _array_member("flat", part)]


def object_parts(array: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of an array whose items are objects, or itself, each with its name as code."""
    numpy: Any = loaded("numpy")
    dtype = _array_member("dtype", array)
    if dtype.fields is not None:
        for name, (kind, *_) in dtype.fields.items():
            if kind.hasobject:
                field = numpy.ndarray.__getitem__(array, name)
                yield from ((f"[{name!r}]{place}", part) for place, part in object_parts(field))
    elif dtype.char == "O":
        yield "", array


def _place_in(array: Any, held: object, part: str, whole: Any, containers: Containers) -> str | None:
    """Return where a part of an array, whose items are objects, has an object, as code; None if it has not."""
    flat = _array_member("flat", array)
    place = containers.place_of(whole, part, len(flat), flat, held)
    if place is None:
        return None
    indices = loaded("numpy").unravel_index(place, _array_member("shape", array))
    return f"[{', '.join(map(str, indices)) or '()'}]"


def _base(item: Any) -> list[object]:
    kind = next(kind for kind in mro_of(type(item)) if "base" in kind.__dict__)
    base = kind.__dict__["base"].__get__(item)
    return [] if base is None else [base]


def _operands(iterator: Any) -> list[object]:
    try:
        return list(loaded("numpy").nditer.__dict__["operands"].__get__(iterator))
    except ValueError:  # closed
        return []


def _of_greenlet(switched: Any) -> list[object]:
    """Return the local variables of the functions in which a greenlet waits, without those of the checker's."""
    return [value for _, frame in _frames_of_greenlet(switched) for value in frame_locals(frame)]


def _frames_of_greenlet(switched: Any) -> Iterator[tuple[str, FrameType]]:
    """Yield them from the innermost out, each as code; one that runs has its frames where all threads have them."""
    code, frame = ".gr_frame", loaded("greenlet").greenlet.__dict__["gr_frame"].__get__(switched)
    while frame is not None:
        if not is_checkers(frame):
            yield code, frame
        code, frame = f"{code}.f_back", frame.f_back


def _local_of_greenlet(switched: Any, held: object) -> str | None:
    """Return the variable that has an object, as code."""
    for code, frame in _frames_of_greenlet(switched):
        variables = [*frame.f_locals.items()]
        frame_locals(frame)  # undoes what reading them left behind
        for name, value in variables:
            if value is held:
                return f"{code}.f_locals[{name!r}]"
    return None


def _result(future: Any) -> list[object]:
    """Return the result of a future of torch's that is done; what is still to come, and callbacks, lie in C++."""
    kind: Any = loaded("torch")._C.Future
    # One that has failed raises its exception, which would take the one that is being handled for its cause.
    if sys.exc_info()[1] is not None or not kind.done(future):
        return []
    try:
        return [kind.value(future)]
    except BaseException as error:  # noqa: BLE001 - of whatever type the error is with which it was done
        _undo_raising(error)
        return []


def _result_and_callbacks(future: Any) -> list[object]:
    """And, of one that is not done, the functions that it will call."""
    is_done = loaded("torch")._C.Future.done(future)
    return _result(future) if is_done else callbacks_of(future)


def _undo_raising(error: BaseException) -> None:
    """Give an exception the traceback that it had before `_result` made torch raise it: it would keep our frames."""
    trace = BaseException.__dict__["__traceback__"].__get__(error)
    while trace is not None and trace.tb_frame.f_code is not _result.__code__:
        trace = trace.tb_next
    # Behind it comes torch's own function, which has raised it.
    trace = None if trace is None or trace.tb_next is None else trace.tb_next.tb_next
    BaseException.__dict__["__traceback__"].__set__(error, trace)


def tensors_of_script(module: Any) -> list[Any]:
    """Return the tensors of a TorchScript module, as Python objects, those of its parts left out."""
    return [tensor for _, tensor in _named_tensors_of_script(module)]


def is_script(cls: type) -> bool:
    """Return whether instances of a type are TorchScript modules."""
    return reader_of(cls, thorough=True) is tensors_of_script


def _named_tensors_of_script(module: Any) -> Iterator[tuple[str, object]]:
    """Parameters, buffers and other tensors, constants of the code (as of a frozen module), inputs of a trace."""
    torch: Any = loaded("torch")
    own: Any = attribute(module, "_c")
    if type(own) is not torch._C.ScriptModule:
        return  # not complete yet
    kind: Any = attribute(module, "_concrete_type")
    if type(kind) is not torch._C.ConcreteModuleType:
        # A frozen one has none.
        kind = torch._C.ConcreteModuleType.from_jit_type(own._type())
    for name, (type_of_it, _) in kind.get_attributes().items():
        if str(type_of_it) in _HOLDING_TENSORS and own.hasattr(name):
            yield from _tensors_within(own.getattr(name), f".{name}")
    for method in own._method_names():
        constants = own._get_method(method).graph.findAllNodes("prim::Constant")
        for place, node in enumerate(constants):
            if node.hasAttribute("value") and node.kindOf("value") == "t":
                code = ".graph" if method == "forward" else f"._c._get_method({method!r}).graph"
                yield f"{code}.findAllNodes('prim::Constant')[{place}].t('value')", node.t("value")
    for method, inputs in own._retrieve_traced_inputs().items():
        yield from _tensors_within(inputs, f"._c._retrieve_traced_inputs()[{method!r}]")


_HOLDING_TENSORS = frozenset({"Tensor", "List[Tensor]", "Dict[str, Tensor]", "Optional[Tensor]"})


def _tensors_within(value: Any, edge: str) -> Iterator[tuple[str, object]]:
    """Yield the tensors in what C++ gives of an attribute: itself, or in lists, tuples and dicts made for it."""
    if is_a(value, loaded("torch").Tensor):
        yield edge, value
    elif type(value) is dict:
        for key, item in value.items():
            yield from _tensors_within(item, f"{edge}[{key!r}]")
    elif type(value) is list or type(value) is tuple:
        for place, item in enumerate(value):
            yield from _tensors_within(item, f"{edge}[{place}]")
