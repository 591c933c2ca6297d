"""Clean: four turns of sleeping and waking leave what they found."""

from __future__ import annotations

from typing import Any

import loop


def test_four_turns(leakcheck: Any) -> None:
    with loop.make_engine() as made:
        engine = leakcheck.engine(made, infer="generate", sleep="sleep", wake="wake")
        loop.run(engine, loop.train, turns=4)
