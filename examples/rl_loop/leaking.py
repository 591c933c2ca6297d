"""The trainer keeps the rollout of each turn: the finding says that it grows, turn by turn."""

from __future__ import annotations

from typing import Any

import loop


def test_four_turns(leakcheck: Any) -> None:
    with loop.make_engine() as made:
        engine = leakcheck.engine(made, infer="generate", sleep="sleep", wake="wake")
        loop.run(engine, loop.train_and_remember, turns=4)
