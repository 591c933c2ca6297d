"""A server that answers as vLLM's and SGLang's do: `answering_server.py NOTES [WAY]… --port N`.

It notes each request in a file, a line of JSON each. Ways: `engine` (lowtide's answers; else tokens that are counted
up), `keeps` (each sleep leaves 32 MiB in a list of the module), `fails` (a sleep is answered with 500), `ends` (it ends
at once), `stays` (it takes no SIGTERM), `wordless` (completions without token ids), `speechless` (what is no JSON),
`short` (an answer that breaks off), `refuses` (no weights are loaded), `wakeful` and `drowsy` (after a sleep, or a
wake, it says the contrary).
"""

from __future__ import annotations

import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

NOTES, WAYS = Path(sys.argv[1]), sys.argv[2:-2]
KEPT: list[Any] = []


class Counting:
    """An engine without memory."""

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        return [[len(ids) + place for place in range(count)] for ids in prompts]

    def sleep(self, level: int) -> None:
        pass

    def wake(self, tags: list[str] | None) -> None:
        pass


class Lowtide:
    """lowtide's."""

    def __init__(self) -> None:
        from lowtide.engine import EngineConfig, LLMEngine

        self.engine = LLMEngine(EngineConfig(kv_cache_bytes=1 << 20))
        self.engine.create()
        self.wake = self.engine.wake

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        from lowtide.engine import SamplingParams

        outputs = self.engine.generate(prompts, SamplingParams(max_tokens=count))
        return [list(output.token_ids) for output in outputs]

    def sleep(self, level: int) -> None:
        self.engine.sleep(level)
        if "keeps" in WAYS:
            import torch

            KEPT.append(torch.ones(8 << 20))


class Handler(BaseHTTPRequestHandler):
    engine: Counting | Lowtide

    is_sleeping = False

    def do_GET(self) -> None:
        said = {
            "/is_sleeping": {"is_sleeping": self.is_sleeping},
            "/get_model_info": {"model_path": "/own"},
            "/v1/models": {"data": [{"id": "own", "root": "/own"}]},
        }
        self._answer(said.get(self.path, {}))

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(sent) if sent else None
        with NOTES.open("a") as notes:
            notes.write(json.dumps([self.path, body]) + "\n")
        asked = urlsplit(self.path)
        query = parse_qs(asked.query)
        if asked.path == "/v1/completions":
            answers = self.engine.generate(body["prompt"], body["max_tokens"])
            tokens = [None] * len(answers) if "wordless" in WAYS else answers
            choices = [{"index": place, "text": "", "token_ids": ids} for place, ids in enumerate(tokens)]
            self._answer({"choices": choices[::-1]})
            return
        if asked.path == "/generate":
            answers = self.engine.generate(body["input_ids"], body["sampling_params"]["max_new_tokens"])
            self._answer([{"output_ids": ids} for ids in answers])
            return
        if "fails" in WAYS:
            self.send_error(500, "no memory is left")
            return
        if asked.path == "/sleep":
            self.engine.sleep(int(query["level"][0]))
            Handler.is_sleeping = "wakeful" not in WAYS
        elif asked.path == "/wake_up":
            self.engine.wake(query.get("tags"))
            Handler.is_sleeping = Handler.is_sleeping and ("tags" in query or "drowsy" in WAYS)
        self._answer({"success": "refuses" not in WAYS})

    def _answer(self, said: Any) -> None:
        text = b"not here" if "speechless" in WAYS else json.dumps(said).encode()
        self.send_response(200)
        is_broken = "short" in WAYS and self.command == "POST"
        self.send_header("Content-Length", str(len(text) + is_broken))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        pass


def main() -> None:
    if "ends" in WAYS:
        sys.stdout.write("loading\nthe weights are not there\n-----\n")
        sys.exit(3)
    if "stays" in WAYS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Handler.engine = Lowtide() if "engine" in WAYS else Counting()
    HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()


if __name__ == "__main__":
    main()
