"""The trainer keeps the rollout of each turn, or the engine something of each update: both grow, turn by turn."""

from __future__ import annotations

from typing import Any

import loop


def test_four_turns(leakcheck: Any) -> None:
    trainer = loop.Trainer()
    with loop.make_engine() as made:
        engine = leakcheck.engine(made, infer="generate", sleep="sleep", wake="wake", update_weights="update_weights")
        loop.run(engine, trainer.weights, trainer.step_and_remember, turns=4)


def test_ten_turns_of_an_engine_that_keeps_what_was_sent(leakcheck: Any) -> None:
    trainer = loop.Trainer()
    with loop.make_engine(loop.KeepsSent) as made:
        engine = leakcheck.engine(made, infer="generate", sleep="sleep", wake="wake", update_weights="update_weights")
        loop.run(engine, trainer.weights, trainer.step, turns=10)
        made.__dict__["sent"].clear()
