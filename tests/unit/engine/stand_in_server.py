"""A server that speaks as much of vLLM's HTTP as the remote engine uses, for a model that is a table of bigrams.

`python stand_in_server.py WEIGHTS PORT` serves until it is ended. `FAULTS` says what it can be told to do wrong.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

VOCABULARY, STOP = 12, 1
FAULTS = {
    "raw": "log-probabilities are of the distribution before the temperature, as is vLLM's default",
    "keeps": "a reload succeeds and changes nothing",
    "fails": "a reload is refused",
    "hangs": "completions never begin",
    "cuts": "completions end in the middle",
    "swaps": "log-probabilities are another token's",
    "omits": "a token has no log-probability",
    "slow": "a token takes long",
    "old": "there are no endpoints for weights",
    "narrow": "there is no endpoint for tokens",
}


def table(seed: int) -> np.ndarray:
    """Logits by token and next token, `[V, V]`."""
    return np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY)) * 2


def save(path: Path, params: Any) -> None:
    path.mkdir(parents=True)
    np.save(path / "table.npy", params["table"])


def logprobs(weights: np.ndarray, last: int, temperature: float = 1.0) -> np.ndarray:
    """Of every next token, `[V]`."""
    logits = weights[last] / temperature
    return logits - np.log(np.exp(logits).sum())


class StandIn(ThreadingHTTPServer):
    """The server; `url` says where, `faults` what it does wrong, `calls` what it was asked."""

    daemon_threads = True

    def __init__(self, weights: np.ndarray, port: int = 0, max_model_len: int = 64, model: str = "tiny") -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.model = model
        self.weights = weights
        self.max_model_len = max_model_len
        self.faults: set[str] = set()
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.label = "default"
        self.paused = False
        self.hung_up = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        self.hung_up.set()


@contextmanager
def serving(seed: int = 0, **options: Any):
    server = StandIn(table(seed), **options)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(data) if data else {}
        self.server.calls.append(self.path)
        if path == "/inference/v1/generate" and "narrow" not in self.server.faults:
            self.server.bodies.append(body)
            if body["model"] == self.server.model:
                self._generate(body)
            else:
                self._json(404, {"error": {"message": f"The model {body['model']} does not exist."}})
            return
        answers = {
            "/health": self._nothing,
            "/v1/models": lambda body: {
                "data": [{"id": self.server.model, "max_model_len": self.server.max_model_len}]
            },
        }
        if "old" not in self.server.faults:
            answers |= {
                "/pause": self._pause,
                "/resume": self._resume,
                "/collective_rpc": self._reload,
                "/reset_prefix_cache": lambda body: {"success": True},
                "/update_weight_version": self._name,
                "/weight_info": lambda body: {"weight_version": self.server.label},
            }
        found = answers.get(path)
        value = found(body) if found else None
        if isinstance(value, dict):
            self._json(200, value)
        else:
            self._json(500 if found else 404, {"detail": value or "Not Found"})

    def _nothing(self, body: Any) -> Any:
        return {}

    def _pause(self, body: Any) -> Any:
        self.server.paused = True
        return {"status": "paused"}

    def _resume(self, body: Any) -> Any:
        self.server.paused = False
        return {"status": "resumed"}

    def _reload(self, body: Any) -> Any:
        assert self.server.paused
        assert body["method"] == "reload_weights"
        if "fails" in self.server.faults:
            return "no memory"
        if "keeps" not in self.server.faults:
            self.server.weights = np.load(Path(body["kwargs"]["weights_path"]) / "table.npy")
        return {"results": [None]}

    def _name(self, body: Any) -> Any:
        self.server.label = body["new_version"]
        return {"success": True}

    # ------------------------------------------------------------------------------------------------- generation

    def _generate(self, body: dict[str, Any]) -> None:
        if "hangs" in self.server.faults:
            time.sleep(30)
        settings, tokens = body["sampling_params"], list(body["token_ids"])
        if settings.get("prompt_logprobs") is not None:
            scored = [
                {str(token): {"logprob": float(logprobs(self.server.weights, last)[token])}}
                for last, token in itertools.pairwise(tokens)
            ]
            self._json(200, {"choices": [], "prompt_logprobs": [None, *scored]})
        elif body.get("stream"):
            self._stream(tokens, settings)
        else:
            entry, _ = self._draw(tokens, settings, np.random.default_rng(settings["seed"]))
            self._json(200, {"choices": [{"logprobs": {"content": [entry]}}]})

    def _draw(self, tokens: list[int], settings: dict[str, Any], rng: np.random.Generator) -> tuple[Any, int]:
        drawn_from = logprobs(self.server.weights, tokens[-1], settings["temperature"])
        reported = logprobs(self.server.weights, tokens[-1]) if "raw" in self.server.faults else drawn_from
        token = int(rng.choice(VOCABULARY, p=np.exp(drawn_from)))
        best = np.argsort(-reported)[: settings["logprobs"]]
        top = [{"token_id": int(one), "logprob": float(reported[one])} for one in best]
        return {"token_id": token, "logprob": float(reported[token]), "top_logprobs": top}, token

    def _stream(self, tokens: list[int], settings: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        rng, count, reason = np.random.default_rng(settings["seed"]), 0, None
        label = self.server.label
        while reason is None:
            if "slow" in self.server.faults:
                time.sleep(0.05)
            entry, token = self._draw(tokens, settings, rng)
            tokens.append(token)
            count += 1
            reason = "stop" if token in settings["stop_token_ids"] else None
            reason = reason or ("length" if count == settings["max_tokens"] else None)
            if "swaps" in self.server.faults:
                entry["token_id"] = (token + 1) % VOCABULARY
            if "omits" in self.server.faults:
                entry["logprob"] = -9999.0
            spans = [{"version": label, "start": 0, "end": count}] if reason else None
            choice = {"token_ids": [token], "logprobs": {"content": [entry]}, "finish_reason": reason}
            self._event(json.dumps({"choices": [{**choice, "weight_versions": spans}]}))
            if "cuts" in self.server.faults:
                self.close_connection = True
                return
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, text: str) -> None:
        data = f"data: {text}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _json(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    print("loading", flush=True)
    weights = np.load(Path(sys.argv[1]) / "table.npy")
    StandIn(weights, int(sys.argv[2]), model=sys.argv[1]).serve_forever()  # named as vLLM does by itself
