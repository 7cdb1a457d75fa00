# SPDX-License-Identifier: Apache-2.0
"""A server on loopback that completes prompts as vLLM and SGLang do.

Its model has 8 tokens. The logits after a token are fixed, so log-probabilities are
known; what it draws depends on the prompt and the seed alone. Weights that it is given
change nothing but their name: in vLLM a new model, in SGLang the only one.
"""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

LOGITS = np.random.default_rng(0).normal(size=(8, 8)) * 2
END = 7


def log_probs_after(token, temperature):
    logits = LOGITS[token % 8] / (temperature or 1.0)
    return logits - np.log(np.exp(logits).sum())


def completion(body, *, is_raw=False):
    """Ids and log-probabilities of what a request asks for, and why it ends."""
    draw = np.random.default_rng([*body["prompt"], body["seed"]])
    ids, found, top = [], [], []
    for _ in range(body["max_tokens"]):
        last = ids[-1] if ids else body["prompt"][-1]
        at = log_probs_after(last, body["temperature"])
        token = int(at.argmax())
        if body["temperature"]:
            token = int(draw.choice(8, p=np.exp(at)))
        shown = log_probs_after(last, 1.0) if is_raw else at
        ids.append(token)
        found.append(float(shown[token]))
        top.append({f"token_id:{shown.argmax()}": float(shown.max())})
        if token in body["stop_token_ids"]:
            return ids, found, top, "stop"
    return ids, found, top, "length"


def vllm(body, **options):
    """An answer as of vLLM 0.10.2."""
    ids, found, top, reason = completion(body, **options)
    logprobs = {
        "tokens": [f"token_id:{token}" for token in ids],
        "token_logprobs": found,
        "top_logprobs": top,
        "text_offset": [0] * len(ids),
    }
    choice = {
        "index": 0,
        "text": "x" * len(ids),
        "logprobs": logprobs,
        "finish_reason": reason,
        "stop_reason": ids[-1] if reason == "stop" else None,
        "token_ids": ids,
        "prompt_token_ids": body["prompt"],
    }
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}
    return {"model": body["model"], "choices": [choice], "usage": usage}


def sglang(body, **options):
    """An answer as of SGLang, whose tokens are text."""
    answer = vllm(body, **options)
    choice = answer["choices"][0]
    choice["matched_stop"] = choice.pop("stop_reason")
    choice["logprobs"]["tokens"] = ["7"] * len(choice["token_ids"])
    return {**answer, "metadata": {"weight_version": "default"}}


class Server:
    """What the tests change and read.

    Attributes:
      answer: From a request's body to what is answered: JSON, or text as it is.
      faults: What the next requests for completions get instead: a status, or a
        function of the handler.
      bodies: The requests for completions.
      headers: Of the last request.
      names: Of the models that it serves.
      version: Of SGLang's weights.
      loaded: The folders of weights, with what was in each when it was loaded.
      refusal: What is answered instead of loading weights: a status and JSON.
    """

    def __init__(self):
        self.answer, self.faults, self.bodies, self.headers = vllm, [], [], {}
        self.url, self.lock, self.names = "", threading.Lock(), ["tiny", "tiny-lora"]
        self.version, self.loaded, self.refusal = "default", [], None

    def get(self, handler):
        self.headers = dict(handler.headers)
        if handler.path != "/v1/models":
            return reply(handler, 404, "<html>Not Found</html>")
        return reply(handler, 200, {"data": [{"id": name} for name in self.names]})

    def post(self, handler):
        size = int(handler.headers["Content-Length"])
        body = json.loads(handler.rfile.read(size))
        if handler.path != "/v1/completions":
            return reply(handler, *self.load(handler.path, body))
        if body["model"] not in self.names and self.answer is vllm:
            return reply(handler, 404, {"error": {"message": "does not exist"}})
        with self.lock:
            self.bodies.append(body)
            fault = self.faults.pop(0) if self.faults else None
        if callable(fault):
            return fault(handler)
        if fault is not None:
            return reply(handler, fault, {"error": {"message": "not now"}})
        answer = self.answer(body)
        if self.answer is sglang:
            answer["metadata"]["weight_version"] = self.version
        return reply(handler, 200, answer)

    def load(self, path, body):
        """The status and the answer of a request to load weights.

        Those of SGLang 0.5 (``http_server.py``, ``tokenizer_manager.py``) and of vLLM
        0.14 (``openai/models/serving.py``).
        """
        if self.refusal is not None:
            return self.refusal
        if (path, self.answer) == ("/update_weights_from_disk", sglang):
            folder = Path(body["model_path"])
            if not body["flush_cache"] or not (folder / "config.json").is_file():
                return 400, {"success": False, "message": "Failed to update weights"}
            self.names, self.version = [str(folder)], body["weight_version"]
            found = {"success": True, "message": "Succeeded to update model weights."}
        elif (path, self.answer) == ("/v1/load_lora_adapter", vllm):
            folder = Path(body["lora_path"])
            if body["lora_name"] in self.names:  # whose keys and values it has
                return 400, {"error": {"message": "has already been loaded"}}
            if not (folder / "adapter_config.json").is_file():
                return 404, {"error": {"message": "No adapter found"}}
            self.names.append(body["lora_name"])
            found = "Success: LoRA adapter added successfully."
        else:
            return 404, {"detail": "Not Found"}
        files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
        self.loaded.append((folder, files))
        return 200, found


def reply(handler, status, answer):
    content = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


@contextmanager
def serving():
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            server.get(self)

        def do_POST(self):
            server.post(self)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        http.block_on_close = False
        server.url = f"http://127.0.0.1:{http.server_port}/v1"
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield server
        http.shutdown()
        thread.join()
