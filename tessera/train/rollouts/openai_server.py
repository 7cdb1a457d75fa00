# SPDX-License-Identifier: Apache-2.0
"""``OpenAIServer``: completions of a vLLM or SGLang server, over HTTP."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from http.client import HTTPException
from itertools import count
from typing import Any, Final
from urllib.parse import urljoin
from urllib.request import HTTPErrorProcessor, ProxyHandler, Request, build_opener

import jax
import numpy as np

from tessera.errors import ServerError, did_you_mean
from tessera.train.checkpoints.first_process import broadcast_from_first
from tessera.train.files.untrusted_json import parse_json
from tessera.train.rollouts.completions import Completion

_AT_ONCE: Final = 64  # requests


class _AnyStatus(HTTPErrorProcessor):
    """Returns what is no success, too, and follows no redirection."""

    def http_response(self, request: Request, response: Any) -> Any:
        return response

    https_response = http_response


@dataclass(frozen=True)
class OpenAIServer:
    """A vLLM or SGLang server, asked for completions by its OpenAI interface.

    Tokens are those that the server sampled, by their ids. Each prompt is a request
    with a seed of its own. A server that is busy, restarts, or gives up a request is
    asked again, at growing intervals. With several processes of JAX, the first asks.
    A key of the server is read from ``OPENAI_API_KEY``.

    **The server has its own copy of the weights**, which ``ServerWeights`` replaces.
    Completions of older weights are off-policy. Their log-probabilities are the
    server's, so the metric of the mismatch shows that, and importance weights correct
    it where they are asked for.

    The same seed gives the same tokens only as far as the server computes a request in
    the same way in every batch (vLLM: ``VLLM_BATCH_INVARIANT=1``; SGLang:
    ``--enable-deterministic-inference``, without which it takes no seeds).

    Args:
      url: Such as ``http://localhost:8000/v1``; no proxy is used.
      model: A name that it serves.
      timeout: Seconds that the server may be silent, and after which a completion is
        not asked for again.
      weight_version: Of an SGLang server that is given weights: their version, which
        each completion must have. Such a server takes the name of the folder that it
        has loaded, so the name is not checked.

    Raises:
      ServerError: [T721] there is no such server, or it does not serve the model.
    """

    url: str
    model: str
    timeout: float = 600.0
    weight_version: str | None = None

    def __post_init__(self) -> None:
        def check(answer: Any) -> None:
            names = [served["id"] for served in answer["data"]]
            if self.model not in names and self.weight_version is None:
                raise ValueError(did_you_mean(self.model, names))

        def find() -> dict[str, Any]:
            self._ask("models", check)
            return {}

        broadcast_from_first(find)  # others may not reach it

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        *,
        num_tokens: int,
        temperature: float = 1.0,
        stop_tokens: Sequence[int] = (),
    ) -> list[Completion]:
        """The completion of each prompt.

        Args:
          prompts: Token ids, at least one each.
          seeds: One for each, as from ``seeds_of``.
          num_tokens: The most tokens of a completion.
          temperature: Divides the logits; 0 takes the most likely token.
          stop_tokens: A completion ends with the first of these, or with one that ends
            texts of the server's model.

        Raises:
          ServerError: [T721] the server refuses a request, does not answer in time, or
            its answer is not what was asked for; its log-probabilities are not at this
            temperature.
        """
        settings = {
            "model": self.model,
            "max_tokens": num_tokens,
            "temperature": temperature,
            "stop_token_ids": [*map(int, stop_tokens)],
            # Else they are those of the model's generation_config.json.
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # texts of two may be equal
        }
        bodies = [
            {**settings, "prompt": [*map(int, prompt)], "seed": int(seed)}
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]

        def work(body: Any) -> Any:
            read = partial(_read, body, self.weight_version)
            return self._ask("completions", read, body)

        def ask() -> list[Any]:
            likely = math.inf
            for hot in (1.0, 10.0) if temperature not in (0, 1) else ():
                body = {**bodies[0], "temperature": hot, "max_tokens": 1}
                likely = self._ask("completions", partial(_likely, likely), body)
            with ThreadPoolExecutor(_AT_ONCE, "openai") as threads:
                return [*threads.map(work, bodies)]

        found = broadcast_from_first(lambda: {"rows": ask() if bodies else []})
        return [
            Completion(np.array(ids, np.int32), np.array(log_probs, np.float32), ended)
            for ids, log_probs, ended in found["rows"]
        ]

    def load(self, path: str, body: Mapping[str, Any]) -> None:
        """Tell the server, once, to load weights.

        Args:
          path: Of the request, below the URL.
          body: Of the request. Whatever a status of 200 comes with is not read.

        Raises:
          ServerError: [T721] it does not load them.
        """
        self._ask(path, None, body)

    def _ask(
        self, path: str, read: Callable[[Any], Any] | None, body: Any = None
    ) -> Any:
        """What is read of the server's answer; completions are asked for again."""
        url = urljoin(f"{self.url.rstrip('/')}/", path)
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        content = None if body is None else json.dumps(body).encode()
        opener, start = build_opener(ProxyHandler({}), _AnyStatus()), time.monotonic()
        for attempt in count():
            answer, is_busy = b"", False
            try:
                request = Request(url, content, headers)
                with opener.open(request, timeout=self.timeout) as response:
                    answer = response.read()
                if response.status == 200:
                    return read and read(parse_json(answer, longest=2**28))
                is_busy = response.status in (408, 429) or response.status >= 500
                got = f"status {response.status}"
            except (OSError, HTTPException) as error:
                got, is_busy = f"{type(error).__name__}: {error}", True
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                got = f"{type(error).__name__}: {error}"
            wait, spent = min(2.0**attempt / 2, 30.0), time.monotonic() - start
            is_last = path != "completions" or spent + wait > self.timeout
            if not is_busy or is_last:
                raise ServerError(
                    f"the server {self.url} does not serve {self.model!r} as asked",
                    got=f"{path}: {got}\n{answer[:300].decode(errors='replace')}\n"
                    f"attempt {attempt + 1}, after {spent:.1f} s",
                    fix="give the URL that ends with /v1 of a vLLM (from 0.10.2 on) or "
                    "SGLang server, a name that it serves, and for weights a folder "
                    "that it sees; see its log",
                )
            time.sleep(wait)


def seeds_of(keys: jax.Array) -> list[int]:
    """A seed of 31 bits for each key of an array: the same key gives the same seed."""
    data = np.asarray(jax.random.key_data(keys))
    digests = (blake2b(row.tobytes(), digest_size=4).digest() for row in data)
    return [int.from_bytes(digest, "little") >> 1 for digest in digests]


def _likely(plain: float, answer: Any) -> float:
    """The log-probability of the most likely token, which falls as it gets hotter.

    Raises:
      ValueError: It does not: servers may give those of temperature 1 at any other.
    """
    found = answer["choices"][0]["logprobs"]
    hot = max(*found["token_logprobs"], *found["top_logprobs"][0].values())
    if hot > plain - 0.05:
        raise ValueError(
            "log-probabilities of temperature 1 at 10: start vLLM with --logprobs-mode "
            "processed_logprobs, SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB, or "
            "sample at temperature 1"
        )
    return hot


def _read(
    body: dict[str, Any], version: str | None, answer: Any
) -> tuple[list[int], list[float], bool]:
    """Tokens, log-probabilities, and whether a stop token ended them.

    Raises:
      ConnectionAbortedError: The server gave up the request, as for new weights.
      ValueError, TypeError, LookupError: It is not what was asked for.
    """
    (choice,), usage, prompt = answer["choices"], answer["usage"], body["prompt"]
    if version is not None and version != (own := answer["metadata"]["weight_version"]):
        raise ValueError(f"its weights are {own}, not {version}: has it started again?")
    reason, found = choice["finish_reason"], choice["logprobs"]
    if reason not in ("stop", "length"):
        raise ConnectionAbortedError(f"the server stopped: {reason}")
    ids, log_probs = choice["token_ids"], found["token_logprobs"]
    most = body["max_tokens"]
    if (
        usage["prompt_tokens"] != len(prompt)
        or (choice.get("prompt_token_ids") or prompt) != prompt
    ):
        raise ValueError("it read another prompt")
    sizes = len(ids), len(log_probs), usage["completion_tokens"]
    if len({*sizes}) > 1 or not 0 < len(ids) <= most:
        raise ValueError(
            f"{sizes} ids, log-probabilities and tokens of usage, of {most}"
        )
    if reason == "length" and len(ids) < most:
        raise ValueError(
            f"cut at {len(ids)} tokens, of {most}: its context is too short"
        )
    # Of SGLang also "NaN happened", where it replaces the last token.
    text = choice.get("stop_reason") or choice.get("matched_stop")
    if isinstance(text, str) or max(log_probs) > 1e-3:
        raise ValueError(f"stopped by {text!r}, log-probabilities <= {max(log_probs)}")
    return ids, log_probs, reason == "stop"
