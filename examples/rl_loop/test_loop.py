"""Clean: fifty turns of sleeping, training, waking and sending weights leave what they found, and nothing grows."""

from __future__ import annotations

from typing import Any

import loop


def test_fifty_turns(leakcheck: Any) -> None:
    trainer = loop.Trainer()
    with loop.make_engine() as made:
        engine = leakcheck.engine(
            made, infer="generate", sleep="sleep", wake="wake", update_weights="update_weights", shutdown="shutdown"
        )
        loop.run(engine, trainer.weights, trainer.step, turns=50)
        # What was sent is what it has.
        before = made.weight_checksums()
        trainer.weights["model.norm.weight"] += 1.0
        engine.update_weights(trainer.weights)
        after = made.weight_checksums()
        assert [name for name in after if after[name] != before[name]] == ["model.norm.weight"]
        engine.shutdown()
