"""`lowtide serve`: what OpenAI's client and vLLM's users ask of it, and that nothing stays of what they have asked."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Completion

from lowtide.engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams
from lowtide.engine.server import Choice, Detokenizer, TokenText
from tests.engine import core_extensions
from tests.engine.random_checkpoint import write_preset
from tests.engine.served import Served, serving
from tests.waiting import wait_until

PROMPTS = ([1, 2, 3], list(range(40)), [7] * 17)
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "extra_body": {"return_token_ids": True}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = ("--max-num-seqs", "4", "--max-model-len", "1024")
    with serving(tmp_path_factory.mktemp("served"), options=options) as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test the server is awake, and has no request."""
    yield
    if "served" in request.fixturenames:
        server: Served = request.getfixturevalue("served")
        server.did("/wake_up")
        wait_until(lambda: server.requests() == (0, 0))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The tokens of the same engine without a server."""
    with LLMEngine(EngineConfig()) as engine:
        return [list(output.token_ids) for output in engine.generate(PROMPTS, SamplingParams(max_tokens=12))]


def ids(choice: Any) -> list[int]:
    found = choice.token_ids
    assert isinstance(found, list)
    return found


def tokens(server: Served, prompt: Any = PROMPTS[0], max_tokens: int = 12, **more: Any) -> list[list[int]]:
    answer = server.client.completions.create(prompt=prompt, max_tokens=max_tokens, **{**GREEDY, **more})
    assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
    return [ids(choice) for choice in answer.choices]


def long_stream(served: Served, max_tokens: int = 1000, prompt: Any = PROMPTS[0]) -> openai.Stream[Completion]:
    """A stream that has begun and takes seconds, unless it is closed."""
    stream: openai.Stream[Completion] = served.client.completions.create(
        prompt=prompt, max_tokens=max_tokens, stream=True, **{**GREEDY, "extra_body": {"ignore_eos": True}}
    )
    next(iter(stream))
    return stream


def reasons(stream: openai.Stream[Completion]) -> list[str]:
    return [str(piece.choices[0].finish_reason) for piece in stream]


def text(server: Served, **more: Any) -> str:
    said = server.client.completions.create(prompt=PROMPTS[0], max_tokens=12, **{**GREEDY, **more}).choices[0].text
    assert isinstance(said, str)
    return said


# What is answered


def test_tokens_are_those_of_the_engine_alone(served: Served, expected: list[list[int]]) -> None:
    assert tokens(served, list(PROMPTS)) == expected
    assert [tokens(served, prompt) for prompt in PROMPTS] == [[each] for each in expected]


def test_the_text_of_an_answer_is_read_as_its_tokens(served: Served, expected: list[list[int]]) -> None:
    answer = served.client.completions.create(prompt="<1><2><3>", max_tokens=6, **GREEDY)
    (choice,) = answer.choices
    assert (ids(choice), choice.finish_reason) == (expected[0][:6], "length")
    assert tokens(served, ["<1><2><3>" + choice.text], 6) == [expected[0][6:]]
    assert tokens(served, ["<1><2><3>", PROMPTS[1]]) == expected[:2]


def test_a_stream_has_the_same_text_piece_by_piece(served: Served, expected: list[list[int]]) -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    *pieces, last = served.client.completions.create(prompt=list(PROMPTS), max_tokens=12, **GREEDY, **options)
    said = [[piece.choices[0] for piece in pieces if piece.choices[0].index == index] for index in range(3)]
    assert [[token for piece in each for token in ids(piece)] for each in said] == expected
    assert "".join(piece.text for piece in said[0]) == text(served)
    assert [[piece.finish_reason for piece in each if piece.finish_reason] for each in said] == [["length"]] * 3
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (60, 36, 96)


def test_a_stream_is_sent_as_events(served: Served) -> None:
    asked = {"prompt": "a", "max_tokens": 200, "temperature": 0, "stream": True, "return_token_ids": True}
    status, said = served.post("/v1/completions", json.dumps(asked).encode())
    *events, done, rest = said.split("\n\n")
    assert (status, done, rest) == (200, "data: [DONE]", "")
    # Tokens that came while the server was busy are one event, but never are all of them.
    assert 1 < len(events) <= 200
    assert all(event.startswith("data: ") for event in events)
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks) == 200


def test_requests_at_the_same_time_get_what_they_get_alone(served: Served, expected: list[list[int]]) -> None:
    async def ask() -> list[list[int]]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(
                *(client.completions.create(prompt=PROMPTS[turn % 3], max_tokens=12, **GREEDY) for turn in range(24))
            )
        return [ids(answer.choices[0]) for answer in answers]

    assert asyncio.run(ask()) == expected * 8


def test_no_more_than_the_seats_run_and_the_others_wait(served: Served) -> None:
    stream = long_stream(served, prompt=[PROMPTS[0]] * 8)
    assert served.requests() == (4, 4)
    stream.close()


def test_each_of_n_answers_has_a_seed_of_its_own(served: Served) -> None:
    drawn: dict[str, Any] = {"temperature": 1, "top_p": 0.9}
    both = tokens(served, n=2, seed=5, **drawn)
    assert both == [*tokens(served, seed=5, **drawn), *tokens(served, seed=6, **drawn)]
    assert both[0] != both[1]
    # Two prompts of two answers each: the answers to one stand together, and it counts once.
    answer = served.client.completions.create(
        prompt=list(PROMPTS[:2]), n=2, seed=5, max_tokens=3, **{**GREEDY, **drawn}
    )
    assert [len(choice.prompt_token_ids) for choice in answer.choices] == [3, 3, 40, 40]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (43, 12)


def test_a_stop_text_ends_an_answer_and_is_no_part_of_it(served: Served) -> None:
    whole = text(served)
    # Its parts come with two tokens.
    stop = whole[len(whole) // 2 - 4 : len(whole) // 2 + 4]
    wanted = whole[: whole.index(stop)]
    options: dict[str, Any] = {"prompt": PROMPTS[0], "max_tokens": 500, "stop": ["no such text", stop], **GREEDY}
    (choice,) = served.client.completions.create(**options).choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (wanted, "stop", stop)
    pieces = [piece.choices[0] for piece in served.client.completions.create(**options, stream=True)]
    assert ("".join(piece.text for piece in pieces), pieces[-1].finish_reason) == (wanted, "stop")
    before = served.metrics()["lowtide:request_success_total stop"]
    assert before >= 2


def test_an_answer_is_the_same_however_many_tokens_come_at_once() -> None:
    said, text = list(b"ebb and flow"), TokenText(None)

    def answer(*ends: int) -> tuple[str, str | None, int]:
        choice = Choice(0, "a", [1], SamplingParams(), Detokenizer(text, [1], ["d f"]), "", has_token_ids=False)
        pieces = []
        for end in ends:
            is_last = end == len(said)
            output = RequestOutput("a", (1,), tuple(said[:end]), is_last, "length" if is_last else None, 0)
            pieces.append(choice.take(output)["text"])
            if choice.finish_reason is not None:
                break
        return "".join(pieces), choice.finish_reason, choice.num_tokens

    assert answer(*range(1, 13)) == answer(12) == answer(4, 8, 12) == ("ebb an", "stop", 9)


def test_a_stop_token_ends_an_answer(served: Served, expected: list[list[int]]) -> None:
    body = {"return_token_ids": True, "stop_token_ids": [expected[0][4]]}
    (choice,) = served.client.completions.create(prompt=PROMPTS[0], **{**GREEDY, "extra_body": body}).choices
    assert (ids(choice), choice.finish_reason, choice.stop_reason) == (expected[0][:5], "stop", expected[0][4])
    assert choice.text == "".join(f"<{token}>" for token in expected[0][:4])


@pytest.mark.parametrize("prompt", [[1, 2, 3], "<1>b"])
def test_an_echo_has_the_prompt_first(prompt: Any, served: Served) -> None:
    shown = prompt if isinstance(prompt, str) else "<1><2><3>"
    alone = served.client.completions.create(prompt=prompt, **GREEDY).choices[0].text
    options: dict[str, Any] = {**GREEDY, "prompt": prompt, "echo": True}
    assert served.client.completions.create(**options).choices[0].text == shown + alone
    pieces = served.client.completions.create(**options, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == shown + alone


# What cannot be answered


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"prompt": list(range(1000))}, "with 1000 prompt tokens and max_tokens 100 is beyond max_model_len 1024"),
        ({"prompt": [5, 1024]}, "has token 1024; the vocabulary has 1024"),
        ({"prompt": [5, 10**30]}, "cannot be sent to the engine core"),
        ({"prompt": []}, "has an empty prompt"),
        ({"prompt": [5, "text"]}, "prompt has tokens beside texts or lists"),
        ({"prompt": None}, "Expected `str | array`, got `null` - at `$.prompt`"),
        ({"max_tokens": "many"}, "Expected `int | null`, got `str` - at `$.max_tokens`"),
        ({"max_tokens": 0}, "max_tokens 0 must be at least 1"),
        ({"temperature": -1}, "temperature -1.0 must be 0 (greedy) or above"),
        ({"seed": -2}, "seed -2 must be from 0"),
        ({"n": 0}, "n 0 must be from 1 to 128"),
        ({"n": 10**9}, "must be from 1 to 128"),
        ({"stop": ["a", ""]}, "stop has an empty text"),
        ({"logprobs": 0}, "logprobs is not supported: leave it out"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_served_is_refused(stream: bool, asked: dict[str, Any], said: str, served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        served.client.completions.create(
            **{"model": "tiny", "prompt": "a", "max_tokens": 100, "stream": stream, **asked}
        )
    assert said in str(refused.value)
    assert refused.value.body == {**refused.value.body, "type": "BadRequestError", "code": 400}  # type: ignore[dict-item]


def test_one_of_several_prompts_that_cannot_be_served_begins_none(served: Served) -> None:
    before = served.metrics()["lowtide:prompt_tokens_total"]
    with pytest.raises(openai.BadRequestError, match="beyond max_model_len"):
        tokens(served, [PROMPTS[0], list(range(1020))])
    assert served.metrics()["lowtide:prompt_tokens_total"] == before


def test_another_model_is_not_found(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="The model `other` does not exist; there is `tiny`"):
        served.client.completions.create(model="other", prompt="a")
    assert [model.id for model in served.client.models.list()] == ["tiny"]


def test_what_is_at_its_neutral_value_is_no_reason_to_refuse(served: Served) -> None:
    more: dict[str, Any] = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "user": "me",
        "best_of": 1,
    }
    assert tokens(served, **more) == tokens(served)


@pytest.mark.parametrize(
    ("path", "body", "kind", "status", "said"),
    [
        ("/v1/completions", b'{"prompt":', "application/json", 400, "the body is no JSON: Input data was truncated"),
        ("/v1/completions", b"\xff", "application/json", 400, "the body is no JSON"),
        ("/v1/completions", b"[]", "application/json", 400, "Expected `object`, got `array`"),
        ("/v1/completions", b'{"prompt": "a"}', "text/plain", 400, "Content-Type: application/json"),
        ("/v1/chat/completions", b"{}", "application/json", 404, "Not Found"),
        ("/health", b"", "", 405, "Method Not Allowed"),
        ("/sleep?level=3", b"", "", 400, "sleep level '3' does not exist"),
        ("/sleep?mode=keep", b"", "", 400, "sleep mode 'keep' does not exist"),
        ("/wake_up?tags=cache", b"", "", 400, "there is no tag 'cache' to wake"),
        ("/collective_rpc", b'{"method": "stop"}', "application/json", 400, "Invalid enum value 'stop'"),
        (
            "/collective_rpc",
            b'{"method": "reload_weights", "kwargs": {"weights_path": "/none"}}',
            "application/json",
            400,
            "/none holds neither model.safetensors",
        ),
    ],
)
def test_a_wrong_call_is_answered_with_an_error(
    path: str, body: bytes, kind: str, status: int, said: str, served: Served
) -> None:
    got, answer = served.post(path, body, kind)
    error = json.loads(answer)["error"]
    assert (got, error["code"]) == (status, status)
    assert said in error["message"]


# Who goes


def test_who_leaves_a_stream_ends_its_request(served: Served) -> None:
    before = served.metrics()
    long_stream(served).close()
    wait_until(lambda: served.requests() == (0, 0))
    after = served.metrics()
    ended = "lowtide:request_success_total abort"
    assert after[ended] == before.get(ended, 0) + 1
    assert after["lowtide:generation_tokens_total"] - before["lowtide:generation_tokens_total"] < 1000


def test_who_leaves_before_the_answer_ends_its_requests(served: Served) -> None:
    begun, ended = "lowtide:prompt_tokens_total", "lowtide:request_success_total abort"
    before = served.metrics()
    address = served.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": list(PROMPTS), "max_tokens": 980, "ignore_eos": True}).encode()
    with socket.create_connection((address[0], int(address[1]))) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_until(lambda: served.metrics()[begun] == before[begun] + 60)
    wait_until(lambda: served.requests() == (0, 0))
    assert served.metrics()[ended] == before.get(ended, 0) + 3


# Sleep


@pytest.mark.parametrize("level", [1, 2])
def test_asleep_it_holds_no_memory_and_awake_it_answers_as_before(level: int, served: Served) -> None:
    before = tokens(served, list(PROMPTS))
    assert served.did(f"/sleep?level={level}") == {"status": "sleeping", "level": level}
    assert served.get("/is_sleeping") == (200, '{"is_sleeping":true}')
    metrics = served.metrics()
    states = ("awake", "weights_offloaded", "discard_all")
    assert [metrics[f"lowtide:engine_sleep_state {state}"] for state in states] == [0, level == 1, level == 2]
    assert {metrics[f"lowtide:memory_mapped_bytes {arena}"] for arena in ("weights", "kv_cache")} == {0}
    # It sleeps on, at its level.
    assert served.did(f"/sleep?level={3 - level}") == {"status": "sleeping", "level": level}
    assert served.did("/wake_up?tags=weights") == {"status": "sleeping", "tags": ["weights"]}
    assert served.metrics()["lowtide:memory_mapped_bytes weights"] > 0
    assert served.did("/wake_up?tags=weights&tags=kv_cache") == {"status": "awake", "tags": ["weights", "kv_cache"]}
    assert served.did("/wake_up") == {"status": "awake", "tags": None}
    assert served.get("/is_sleeping") == (200, '{"is_sleeping":false}')
    assert served.metrics()["lowtide:engine_sleep_state awake"] == 1
    assert tokens(served, list(PROMPTS)) == before


def test_a_request_that_comes_while_it_sleeps_waits(served: Served, expected: list[list[int]]) -> None:
    served.did("/sleep")
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(tokens, served, list(PROMPTS))
        refused = pool.submit(tokens, served, [2000])
        wait_until(lambda: served.requests() == (0, 4))
        served.did("/wake_up?tags=kv_cache")
        assert served.requests() == (0, 4)
        served.did("/wake_up")
        assert asked.result() == expected
        with pytest.raises(openai.BadRequestError, match="has token 2000"):
            refused.result()


def test_who_leaves_while_it_sleeps_leaves_nothing_there(served: Served) -> None:
    served.did("/sleep")
    for stream in (False, True):
        with pytest.raises(openai.APITimeoutError):
            tokens(served, timeout=0.2, stream=stream)
    wait_until(lambda: served.requests() == (0, 0))
    before = served.metrics()["lowtide:prompt_tokens_total"]
    served.did("/wake_up")
    assert served.metrics()["lowtide:prompt_tokens_total"] == before


@pytest.mark.parametrize(("mode", "reason", "count"), [("abort", "abort", None), ("wait", "length", 300)])
def test_a_sleep_ends_or_awaits_what_runs(mode: str, reason: str, count: int | None, served: Served) -> None:
    before = served.metrics()["lowtide:generation_tokens_total"]
    stream = long_stream(served, count or 1000)
    assert served.did(f"/sleep?mode={mode}") == {"status": "sleeping", "level": 1}
    assert reasons(stream)[-1] == reason
    made = served.metrics()["lowtide:generation_tokens_total"] - before
    assert made == count or (count is None and made < 1000)


def test_until_all_have_ended_a_sleep_that_waits_changes_nothing_for_them(served: Served) -> None:
    leaving, staying = long_stream(served), long_stream(served, 300)
    with ThreadPoolExecutor(2) as pool:
        sleeping = pool.submit(served.did, "/sleep?mode=wait")
        wait_until(lambda: served.get("/is_sleeping") == (200, '{"is_sleeping":true}'))
        coming = pool.submit(tokens, served)
        wait_until(lambda: served.requests()[1] == 1)
        leaving.close()
        said = reasons(staying)
        # Piece by piece, not all at the end.
        assert len(said) > 100
        assert said[-1] == "length"
        assert sleeping.result() == {"status": "sleeping", "level": 1}
        assert served.requests() == (0, 1)
        served.did("/wake_up")
        assert len(coming.result()[0]) == 12


def test_prefixes_are_cached_until_they_are_forgotten(served: Served) -> None:
    def cached() -> Any:
        usage = served.client.completions.create(prompt=PROMPTS[1], max_tokens=1, **GREEDY).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens

    served.did("/reset_prefix_cache")
    assert [cached(), cached()] == [0, 32]
    assert served.did("/reset_prefix_cache") == {"success": True}
    assert [cached(), cached()] == [0, 32]
    stream = long_stream(served)
    assert served.did("/reset_prefix_cache") == {"success": False}
    stream.close()
    served.did("/sleep")
    assert served.did("/reset_prefix_cache") == {"success": True}


def test_another_checkpoint_gives_its_tokens_until_the_first_is_loaded_again(
    served: Served, expected: list[list[int]], tmp_path: Path
) -> None:
    with LLMEngine(EngineConfig(seed=1)) as engine:
        others = [list(output.token_ids) for output in engine.generate(PROMPTS, SamplingParams(max_tokens=12))]

    def reload(**kwargs: str) -> Any:
        status, said = served.post(
            "/collective_rpc", json.dumps({"method": "reload_weights", "kwargs": kwargs}).encode()
        )
        assert status == 200, said
        return json.loads(said)

    # What is cached of the weights before is forgotten.
    assert tokens(served, list(PROMPTS)) == expected
    assert reload(weights_path=str(write_preset(tmp_path / "others", 1))) == {"results": [None]}
    assert tokens(served, list(PROMPTS)) == others
    served.did("/sleep?level=1")
    served.did("/wake_up")
    assert tokens(served, list(PROMPTS)) == others
    reload()
    assert tokens(served, list(PROMPTS)) == expected


def test_metrics_count_what_was_asked(served: Served) -> None:
    tokens(served, PROMPTS[1])
    before = served.metrics()
    tokens(served, [PROMPTS[1], PROMPTS[1]])
    counted = (
        "prompt_tokens_total",
        "prompt_tokens_cached_total",
        "generation_tokens_total",
        "request_success_total length",
    )
    after = served.metrics()
    made = [after[f"lowtide:{name}"] - before[f"lowtide:{name}"] for name in counted]
    assert made == [80, 64, 24, 2]
    assert after["lowtide:kv_cache_usage_perc"] == 0
    stream = long_stream(served)
    assert 0 < served.metrics()["lowtide:kv_cache_usage_perc"] < 1
    stream.close()


# Its end


@pytest.mark.nightly
def test_sigterm_aborts_what_runs_and_leaves_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        stream = long_stream(server, 2000)
        server.process.terminate()
        assert reasons(stream)[-1] == "abort"
        assert server.end_code() == -signal.SIGTERM
        assert "Traceback" not in server.log.read_text()


@pytest.mark.nightly
def test_a_core_does_not_survive_its_server(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        stream = long_stream(server, 2000)
        server.process.kill()
        assert server.end_code() == -signal.SIGKILL
        with pytest.raises(openai.APIConnectionError):
            list(stream)


FAULTY = """
import sys
from lowtide.engine import EngineConfig, LLMEngine
from lowtide.engine.errors import EngineDeadError
from lowtide.engine.server import serve

try:
    serve(LLMEngine(EngineConfig(engine_process=True, process_extensions=tuple(sys.argv[1:]))), "127.0.0.1", 0)
except EngineDeadError as error:
    sys.exit(f"dead: {error}")
"""


@pytest.mark.nightly
def test_a_core_that_fails_a_step_is_interrupted_and_is_killed(tmp_path: Path, expected: list[list[int]]) -> None:
    """One server for all three, because it takes seconds to start."""
    stops, fails = core_extensions.Stops(tmp_path / "stops"), tmp_path / "fails"
    extensions = (stops.extension, f"{core_extensions.__name__}:failing={fails}")
    with serving(tmp_path, "-c", FAULTY, *extensions) as server, ThreadPoolExecutor(2) as pool:
        # A step that fails ends its requests, those that stream and those that do not, and no other.
        stream = long_stream(server, 2000)
        asked = pool.submit(tokens, server, PROMPTS[1], 1900)
        wait_until(lambda: server.metrics()["lowtide:prompt_tokens_total"] == 43)
        fails.touch()
        with pytest.raises(openai.APIError, match="a planted error of a step"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="a planted error of a step"):
            asked.result()
        assert server.requests() == (0, 0)
        assert tokens(server, list(PROMPTS)) == expected
        # The terminal's Ctrl-C, of which the core hears too, loses no request.
        stops.arm("execute")
        asked = pool.submit(tokens, server, list(PROMPTS))
        os.kill(stops.wait_for("execute"), signal.SIGINT)
        assert asked.result() == expected
        # Of a core that is killed while nobody asks for anything, the server hears all the same.
        stream = long_stream(server, 2000)
        server.core.kill()
        with pytest.raises(openai.APIError, match=r"lowtide::EngineCore \(pid \d+\) has ended: killed by SIGKILL"):
            list(stream)
        assert server.end_code() == 1
        assert "dead: lowtide::EngineCore" in server.log.read_text()
