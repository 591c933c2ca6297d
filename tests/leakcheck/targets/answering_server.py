"""A server that answers as vLLM's and SGLang's do, without an engine: `answering_server.py NOTES [WAY]… --port N`.

It notes each request in a file, a line of JSON each. Ways: `fails` (a sleep is answered with 500), `ends` (it ends at
once), `stays` (it takes no SIGTERM), `wordless` (completions without token ids).
"""

from __future__ import annotations

import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(sent) if sent else None
        with NOTES.open("a") as notes:
            notes.write(json.dumps([self.path, body]) + "\n")
        if self.path.startswith("/v1/completions"):
            self._answer({"choices": [choice(place, ids, body) for place, ids in enumerate(body["prompt"])][::-1]})
        elif self.path == "/generate":
            self._answer(
                [{"output_ids": new(ids, body["sampling_params"]["max_new_tokens"])} for ids in body["input_ids"]]
            )
        elif "fails" in WAYS:
            self.send_error(500, "no memory is left")
        else:
            self._answer({"status": "done"})

    def _answer(self, said: Any) -> None:
        text = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        pass


def choice(place: int, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
    tokens = None if "wordless" in WAYS else new(ids, body["max_tokens"])
    return {"index": place, "text": "", "token_ids": tokens}


def new(ids: list[int], count: int) -> list[int]:
    return [len(ids) + place for place in range(count)]


if __name__ == "__main__":
    NOTES, WAYS = Path(sys.argv[1]), sys.argv[2:-2]
    if "ends" in WAYS:
        sys.stdout.write("loading\nthe weights are not there\n")
        sys.exit(3)
    if "stays" in WAYS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
