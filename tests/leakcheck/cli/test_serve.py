"""`lowtide serve` as a command: what it refuses, how Ctrl-C ends it, and a checkpoint with a tokenizer behind it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from lowtide.engine import EngineConfig, LLMEngine, SamplingParams
from tests.engine.random_checkpoint import SHAPE, write_random_checkpoint
from tests.engine.served import serving
from tests.waiting import HANG_S

pytestmark = pytest.mark.nightly


def refused(*options: str) -> str:
    """What the command says where it ends with exit code 2."""
    command = [sys.executable, "-m", "lowtide", "serve", "--device", "cpu", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    return done.stderr


def test_what_cannot_be_served_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert refused("--port", port) == (
            f"lowtide: port {port} of 127.0.0.1 cannot be listened at (Address already in use): choose others\n"
        )
    assert refused("--host", "no.such.host.invalid").startswith("lowtide: port 8000 of no.such.host.invalid cannot be")
    assert refused("--twin") == "lowtide: --twin needs --defect NAME: it is that engine without the bug\n"
    assert refused("--defect", "none-such").startswith("lowtide: ")
    assert refused("--max-num-seqs", "0") == "lowtide: max_num_seqs 0 must be a whole number of at least 1\n"
    assert "is beyond the model's max_position_embeddings" in refused("--max-model-len", "100000")


def test_ctrl_c_of_a_terminal_ends_it_in_order(tmp_path: Path) -> None:
    """It reaches the core at the same time."""
    with serving(tmp_path) as server:
        stream = server.client.completions.create(
            model="tiny", prompt="a", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        for pid in (server.core.pid, server.process.pid):
            os.kill(pid, signal.SIGINT)
        assert [str(piece.choices[0].finish_reason) for piece in stream][-1] == "abort"
        assert server.end_code() == 0
        assert "Traceback" not in server.log.read_text()


def test_text_goes_through_the_tokenizer_of_a_checkpoint(tmp_path: Path) -> None:
    folder = write_random_checkpoint(tmp_path / "model")
    tokenizer = Tokenizer(WordLevel({f"word{number}": number for number in range(SHAPE["vocab_size"])}, "word0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    with LLMEngine(EngineConfig(model=str(folder))) as engine:
        (output,) = engine.generate([[5, 6]], SamplingParams(max_tokens=6))
        expected = engine.decode(output.token_ids)
    with serving(tmp_path, options=("--model", str(folder))) as server:
        create = server.client.completions.create
        answer = create(model=str(folder), prompt="word5 word6", max_tokens=6, temperature=0)
        assert answer.choices[0].text.split() == expected.split()
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 2
        pieces = create(model=str(folder), prompt="word5 word6", max_tokens=6, temperature=0, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == answer.choices[0].text
