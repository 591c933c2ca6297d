"""Python imports this at the start of each process whose `PYTHONPATH` begins with this folder: it starts the agent.

Then comes the program's own `sitecustomize`, as if this one were not there.
"""

import sys
from _frozen_importlib import module_from_spec


def _start() -> None:
    folder = __file__.rpartition("/")[0]
    try:
        # Beside this file, in the folder that only such a process has in its path.
        import lowtide_agent  # type: ignore[import-not-found]

        lowtide_agent.start()
    finally:
        # Children find it by `PYTHONPATH`; the program need not see it, nor the modules that it has not imported.
        sys.path[:] = [entry for entry in sys.path if entry != folder]
        sys.path_importer_cache.pop(folder, None)
        sys.modules.pop("lowtide_agent", None)


def _run_own() -> None:
    """Run the program's own, in this one's place among the modules.

    Raises:
        ImportError: it has none, which `site` expects.
    """
    specs = (finder.find_spec(__name__, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    spec = next((spec for spec in specs if spec is not None), None)
    if spec is None or spec.loader is None:
        raise ImportError("the program has no sitecustomize of its own", name=__name__)
    module = module_from_spec(spec)
    sys.modules[__name__] = module
    spec.loader.exec_module(module)


_start()
_run_own()
