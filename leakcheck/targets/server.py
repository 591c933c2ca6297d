"""A server that runs in processes of its own, driven over HTTP through its whole life: `vllm serve`, SGLang's, ours.

    lowtide check lowtide.targets:vllm_server -- vllm serve MODEL --enable-sleep-mode

`create` starts the command and waits until it answers, `shutdown` sends SIGTERM and waits until it has ended; between
them each stage is a request. What its processes hold is read by the agents in them, as in every other program.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from lowtide.leakcheck.targets.target import Capabilities, TargetError

START_S = 600.0
"""Seconds that a server may take until it answers: it loads weights, and may compile."""

ANSWER_S = 300.0
"""Seconds that an answer may take."""

END_S = 120.0
"""Seconds that it may take to end after SIGTERM."""

_POLL_S = 0.1
_HEALTH_S = 5.0
_SHOWN = 400
WEIGHTS = "--weights"
"""The word before a command that is followed by another checkpoint: `--weights DIR vllm serve MODEL`."""

TOKENS = range(10, 100)
"""Token ids of prompts: every vocabulary has them, and special ones are elsewhere."""


_FAILED = (OSError, http.client.HTTPException)
"""What a request raises that was not answered, or not to the end."""

# To this machine, whatever proxy the environment names for others.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(Exception):
    """A server did not start, did not end, or answered with an error; it says what the server said last."""


class ServerTarget(ABC):
    """A server as a target.

    Args:
        command: what starts it, to listen on 127.0.0.1; where it has no `--port`, one that is free is added. Before it
            there may be `--weights` and the folder of another checkpoint of the same model, which is loaded into the
            server that runs, as a trainer has it done.
        device: where it keeps its memory, "cpu" or "cuda:N".

    Attributes:
        sleep_option: the option of the command with which it can sleep; empty for one that always can.
        levels: at which it can sleep.
        keeping_levels: those from which weights come back that were loaded while it ran.
        parts: what it can wake one by one.
        variables: of its environment.
    """

    sleep_option: ClassVar[str]
    levels: ClassVar[Sequence[int]] = (1,)
    keeping_levels: ClassVar[Sequence[int]] = (1,)
    parts: ClassVar[Sequence[str]] = ("weights", "kv_cache")
    variables: ClassVar[Mapping[str, str]] = {}

    def __init__(self, command: Sequence[str], device: str) -> None:
        self._checkpoint = ""
        if [*command[:1]] == [WEIGHTS]:
            self._checkpoint, command = _folder(command[1:2]), command[2:]
        if not command:
            raise TargetError("there is no command to start: write it after --, such as -- vllm serve MODEL")
        sleeps = not self.sleep_option or self.sleep_option in command
        self.capabilities = Capabilities(
            device=device,
            sleep_levels=self.levels if sleeps else (),
            wake_tags=self.parts if sleeps else (),
            prefix_cache=True,
            update_weights=bool(self._checkpoint),
            keeping_levels=self.keeping_levels if sleeps else (),
        )
        self._command = [*command]
        self._url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._output = ""
        self._keeps_output = False

    def create(self, config: Mapping[str, Any]) -> None:
        """Start it, and wait until it is ready.

        Raises:
            ServerError: it ended, or was not ready in time.
            TargetError: its command is not there, or its port is another server's.
        """
        named = self._port()
        if named and _is_taken(named):
            raise TargetError(f"port {named} of the command is in use: end what listens there, or leave --port out")
        port = named or _free_port()
        added = () if named else ("--port", str(port))
        self._url = f"http://127.0.0.1:{port}"
        self._keeps_output = False
        # Until `shutdown`, and for good where something fails.
        descriptor, self._output = tempfile.mkstemp(prefix="lowtide-server-", suffix=".log")
        try:
            self._process = subprocess.Popen(
                [*self._command, *added],
                env={**os.environ, **self.variables},
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            self._close()
            raise TargetError(f"{self._command[0]} cannot be started: {error.strerror}") from error
        finally:
            os.close(descriptor)
        self._wait_until_ready(self._process)

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        latest = time.monotonic() + START_S
        while not self._is_ready():
            if process.poll() is not None:
                raise ServerError(f"the server ended with {process.returncode} before it was ready{self._said()}")
            if time.monotonic() > latest:
                raise ServerError(f"the server was not ready after {START_S:g} s{self._said()}")
            time.sleep(_POLL_S)

    def _is_ready(self) -> bool:
        try:
            with self.get("/health") as answer:
                return bool(answer.status == 200)
        except _FAILED:
            return False

    def get(self, path: str) -> http.client.HTTPResponse:
        """Return the answer to a question that is answered at once; raises what is raised where it is not."""
        answer: http.client.HTTPResponse = _OPENER.open(f"{self._url}{path}", timeout=_HEALTH_S)
        return answer

    @abstractmethod
    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        """Return the greedy tokens of each prompt."""

    @abstractmethod
    def update_weights(self, version: int) -> None:
        """Have it load the checkpoint of its command (0), or the other one (1); see `Updating`."""

    def shutdown(self) -> None:
        """End it with SIGTERM, as whoever runs it does.

        Raises:
            ServerError: it did not end in time, and was killed.
        """
        process, self._process = self._process, None
        try:
            if process is not None and process.poll() is None:
                process.terminate()
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    raise ServerError(f"the server had not ended {END_S:g} s after SIGTERM{self._said()}") from None
        finally:
            self._close()

    def post(self, path: str, body: Mapping[str, Any] | None = None, query: Sequence[tuple[str, Any]] = ()) -> str:
        """Send a request, and return the text of the answer.

        Raises:
            ServerError: the server answered with an error, or not at all.
        """
        asked = f"?{urllib.parse.urlencode(query)}" if query else ""
        data = b"" if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}{path}{asked}", data=data, headers=headers, method="POST")
        try:
            with _OPENER.open(request, timeout=ANSWER_S) as answer:
                return str(answer.read(), errors="replace")
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(_SHOWN).decode(errors="replace").strip()
            raise ServerError(f"POST {path} was answered with {error.code}: {said}") from None
        except _FAILED as error:
            raise ServerError(f"POST {path} was not answered: {error}{self._said()}") from None

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a request as JSON, and return the answer's JSON; for the errors see `post`."""
        said = self.post(path, body)
        try:
            return json.loads(said)
        except ValueError:
            raise ServerError(f"POST {path} was answered with what is no JSON: {said[:_SHOWN]!r}") from None

    def _said_of_itself(self, path: str, *keys: str | int) -> str:
        """Return what is in the answer to a question, behind some keys.

        Raises:
            ServerError: it was not answered, or that is not in it.
        """
        try:
            with self.get(path) as answer:
                said = json.load(answer)
            for key in keys:
                said = said[key]
            return str(said)
        except (*_FAILED, ValueError, LookupError, TypeError) as error:
            raise ServerError(f"GET {path} was not answered with its {keys[-1]}: {error!r}") from None

    def _port(self) -> int:
        """Return the port that the command names, or 0."""
        for here, following in itertools.pairwise([*self._command, ""]):
            name, _, value = here.partition("=")
            if name == "--port" and (value or following).isdigit():
                return int(value or following)
        return 0

    def _said(self) -> str:
        """Return the last line that the server wrote, and where all that it wrote stays; empty where none runs."""
        if not self._output:
            return ""
        self._keeps_output = True
        lines = Path(self._output).read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if any(map(str.isalnum, line))), "nothing")
        return f"; it wrote last: {last} (the rest is in {self._output})"

    def _close(self) -> None:
        output, self._output = self._output, ""
        if output and not self._keeps_output:
            Path(output).unlink()


class VllmServer(ServerTarget):
    """`vllm serve`, or `python -m vllm.entrypoints.openai.api_server`.

    With `--enable-sleep-mode` it sleeps at level 1; the requests for that are answered in vLLM's mode for developers,
    which is switched on here.
    """

    sleep_option = "--enable-sleep-mode"
    variables: ClassVar[Mapping[str, str]] = {"VLLM_SERVER_DEV_MODE": "1"}

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        """See `ServerTarget`: one request for completions with all prompts."""
        answer = self.ask(
            "/v1/completions",
            {
                "prompt": [_prompt(length) for length in prompt_lengths],
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        if any(choice.get("token_ids") is None for choice in choices):
            raise TargetError("the server's completions have no token_ids: vLLM 0.10.2 and newer give them")
        return [choice["token_ids"] for choice in choices]

    def sleep(self, level: int, mode: str) -> Mapping[str, Sequence[int]]:
        """See `Sleeping`; a server that then says that it is awake has not slept."""
        self.post("/sleep", query=[("level", level)])
        self._must_say(sleeps=True, after="POST /sleep")
        return {}

    def wake(self, tags: Sequence[str] | None) -> None:
        """See `Sleeping`; a server of which nothing may be asleep any more has to say so."""
        self.post("/wake_up", query=[("tags", tag) for tag in tags or ()])
        if tags is None:
            self._must_say(sleeps=False, after="POST /wake_up")

    def _must_say(self, *, sleeps: bool, after: str) -> None:
        """Compare what the server answers to `/is_sleeping`, where it answers that.

        Raises:
            ServerError: it says the contrary.
        """
        with contextlib.suppress(*_FAILED, ValueError), self.get("/is_sleeping") as answer:
            said = json.load(answer)
            if type(said) is dict and said.get("is_sleeping") is not None and said["is_sleeping"] is not sleeps:
                raise ServerError(f"{after} was answered, and then /is_sleeping with {json.dumps(said)}")

    def reset_prefix_cache(self) -> bool:
        """See `PrefixCaching`."""
        self.post("/reset_prefix_cache")
        return True

    def update_weights(self, version: int) -> None:
        """See `ServerTarget`: each worker reads the files; what other weights have computed is forgotten."""
        # Without a path vLLM reads the files that it has read last.
        path = self._checkpoint if version else self._said_of_itself("/v1/models", "data", 0, "root")
        self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        self.reset_prefix_cache()


class LowtideServer(VllmServer):
    """`lowtide serve`, which answers as vLLM's server does, and sleeps at both levels."""

    sleep_option = ""
    levels = (1, 2)


class SglangServer(ServerTarget):
    """`python -m sglang.launch_server`; with `--enable-memory-saver` it sleeps. Written from its documentation."""

    sleep_option = "--enable-memory-saver"
    # Its pages come back without what was in them, and whoever wakes it sends the weights.
    keeping_levels = ()

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        """See `ServerTarget`: one native request with all prompts."""
        answers = self.ask(
            "/generate",
            {
                "input_ids": [_prompt(length) for length in prompt_lengths],
                "sampling_params": {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True},
            },
        )
        if any("output_ids" not in answer for answer in answers):
            raise TargetError("the server's answers have no output_ids: SGLang 0.4.7 and newer give them")
        return [answer["output_ids"] for answer in answers]

    def sleep(self, level: int, mode: str) -> Mapping[str, Sequence[int]]:
        """See `Sleeping`."""
        self.post("/release_memory_occupation", {"tags": [*self.parts]})
        return {}

    def wake(self, tags: Sequence[str] | None) -> None:
        """See `Sleeping`."""
        self.post("/resume_memory_occupation", {"tags": [*(tags or self.parts)]})

    def reset_prefix_cache(self) -> bool:
        """See `PrefixCaching`."""
        self.post("/flush_cache")
        return True

    def update_weights(self, version: int) -> None:
        """See `ServerTarget`; with the weights it forgets what others have computed."""
        path = self._checkpoint if version else self._said_of_itself("/get_model_info", "model_path")
        answer = self.ask("/update_weights_from_disk", {"model_path": path})
        if answer.get("success") is False:
            raise ServerError(f"POST /update_weights_from_disk was answered with {json.dumps(answer)}")


def vllm_server(*command: str) -> VllmServer:
    """Return vLLM's server as a target, with the command that starts it."""
    return VllmServer(command, _device())


def lowtide_server(*command: str) -> LowtideServer:
    """Return the reference engine's server as a target, with the command that starts it."""
    return LowtideServer(command, _device())


def sglang_server(*command: str) -> SglangServer:
    """Return SGLang's server as a target, with the command that starts it."""
    return SglangServer(command, _device())


def _device() -> str:
    """Return where a server keeps its memory: the first card that this process may use, or the CPU."""
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"


def _prompt(length: int) -> list[int]:
    return list(itertools.islice(itertools.cycle(TOKENS), length))


def _folder(words: Sequence[str]) -> str:
    if not words or not Path(words[0]).is_dir():
        named = words[0] if words else "nothing"
        raise TargetError(f"{WEIGHTS} is followed by {named}: give the folder of another checkpoint of the same model")
    return str(Path(words[0]).resolve())


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _is_taken(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0
