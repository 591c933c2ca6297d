"""lowtide's engine behind the requests that vLLM's server answers: `engine_server.py [keeps] --port N`.

With `keeps` each sleep leaves 32 MiB in a list of its module.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch

from lowtide.engine import EngineConfig, LLMEngine, SamplingParams

KEPT: list[torch.Tensor] = []


class Handler(BaseHTTPRequestHandler):
    engine: LLMEngine

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        asked = urlsplit(self.path)
        query = parse_qs(asked.query)
        if asked.path == "/v1/completions":
            self._answer({"choices": self._completed(json.loads(sent))})
            return
        if asked.path == "/sleep":
            self.engine.sleep(int(query["level"][0]))
            if "keeps" in sys.argv:
                KEPT.append(torch.ones(8 << 20))
        elif asked.path == "/wake_up":
            self.engine.wake(query.get("tags"))
        else:
            self.engine.reset_prefix_cache()
        self._answer({})

    def _completed(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        outputs = self.engine.generate(body["prompt"], SamplingParams(max_tokens=body["max_tokens"]))
        return [{"index": place, "token_ids": list(output.token_ids)} for place, output in enumerate(outputs)]

    def _answer(self, said: object) -> None:
        text = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        pass


def main() -> None:
    with LLMEngine(EngineConfig(kv_cache_bytes=1 << 20)) as engine:
        Handler.engine = engine
        HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()


if __name__ == "__main__":
    main()
