# SPDX-License-Identifier: Apache-2.0
"""Completions over HTTP are those that the server sampled, or an error says why not."""

import socket
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tessera.errors import ServerError
from tessera.train.rollouts import OpenAIServer, openai_server, seeds_of
from tests.train.rollouts.completion_server import (
    END,
    completion,
    log_probs_after,
    reply,
    serving,
    sglang,
    vllm,
)

PROMPTS = [[1, 2], [3], [1, 2], [5, 0, 6], [4]]
SEEDS = [10, 11, 12, 13, 14]


@pytest.fixture
def server():
    with serving() as started:
        yield started


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """The waits between requests, which take no time here."""
    found = list[float]()
    clock = SimpleNamespace(
        sleep=found.append, monotonic=lambda: time.monotonic() + sum(found)
    )
    monkeypatch.setattr(openai_server, "time", clock)
    return found


def complete(server, **options):
    client = OpenAIServer(server.url, "tiny", timeout=options.pop("timeout", 10.0))
    prompts, seeds = options.pop("prompts", PROMPTS), options.pop("seeds", SEEDS)
    options = {"num_tokens": 6, "stop_tokens": [END], **options}
    return client.complete(prompts, seeds, **options)


# --- what comes back


@pytest.mark.parametrize("answer", [vllm, sglang])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_completions_are_what_the_server_sampled(server, answer, temperature):
    server.answer = answer
    found = complete(server, temperature=temperature)
    assert {one.ended for one in found} == {True, False}
    for own, prompt in zip(found, PROMPTS, strict=True):
        ids = own.tokens.tolist()
        assert own.ended == (ids[-1] == END)
        assert own.ended or len(ids) == 6
        before = [prompt[-1], *ids[:-1]]
        expected = [
            log_probs_after(last, temperature)[token]
            for last, token in zip(before, ids, strict=True)
        ]
        np.testing.assert_allclose(own.log_probs, expected, rtol=1e-6)
        assert (own.tokens.dtype, own.log_probs.dtype) == (np.int32, np.float32)


def test_a_request_asks_for_the_plain_distribution_and_all_that_is_read(server):
    """A server's own defaults are those of the model's generation_config.json."""
    complete(server, prompts=[np.array([1, 2], np.int32)], seeds=[np.int64(5)])
    assert server.bodies == [
        {
            "model": "tiny",
            "prompt": [1, 2],
            "seed": 5,
            "max_tokens": 6,
            "temperature": 1.0,
            "stop_token_ids": [END],
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
    ]


def test_the_same_seeds_ask_the_same_however_many_requests_there_are(server):
    client = OpenAIServer(server.url, "tiny")
    options = {"num_tokens": 6, "stop_tokens": [END]}
    whole = client.complete(PROMPTS, SEEDS, **options)
    part = client.complete(PROMPTS[2:3], SEEDS[2:3], **options)
    assert part[0].tokens.tolist() == whole[2].tokens.tolist()
    assert whole[0].tokens.tolist() != whole[2].tokens.tolist()
    assert client.complete([], [], **options) == []
    with pytest.raises(ValueError, match="zip"):
        client.complete(PROMPTS, SEEDS[:2], **options)


def test_seeds_are_those_of_keys():
    keys = jax.random.split(jax.random.key(3), 500)
    seeds = seeds_of(keys)
    assert seeds_of(keys[7:8]) == seeds[7:8]
    assert len(set(seeds)) == 500
    assert all(0 <= seed < 2**31 for seed in seeds)
    plain = [jax.random.key(0), jax.random.key(1), jax.random.key(0, impl="rbg")]
    assert len({seeds_of(key[None])[0] for key in plain}) == 3


def test_the_key_of_the_environment_is_sent(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    OpenAIServer(server.url, "tiny")
    assert server.headers["Authorization"] == "Bearer secret"


def test_a_proxy_of_the_environment_is_not_used(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert len(complete(server)) == 5


# --- servers that are busy, restart or break


def close_in_the_middle(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)


def reset(handler):
    handler.connection.shutdown(socket.SHUT_RDWR)


def aborted(handler):
    reply(
        handler,
        200,
        {
            "choices": [{"finish_reason": "abort", "logprobs": None}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 0},
        },
    )


@pytest.mark.parametrize(
    "fault",
    [429, 500, 503, close_in_the_middle, reset, aborted],
    ids=["429", "500", "503", "closes", "resets", "aborts"],
)
def test_a_server_that_fails_for_a_while_is_asked_the_same_again(server, fault, waits):
    server.faults = [fault] * 3
    (found,) = complete(server, prompts=[[1]], seeds=[1])
    assert waits == [0.5, 1.0, 2.0]
    assert server.bodies == server.bodies[:1] * 4
    assert found.tokens.tolist() == completion(server.bodies[0])[0]


def test_a_server_that_fails_for_ever_is_an_error_that_says_how_often(server):
    server.faults = [503] * 99
    with pytest.raises(ServerError) as caught:
        complete(server, prompts=[[1]], seeds=[1], timeout=3.0)
    assert str(caught.value).startswith(
        f"[T721] the server {server.url} does not serve 'tiny' as asked\n"
        "  got: completions: status 503\n"
        '  got: {"error": {"message": "not now"}}\n'
        "  got: attempt 3, after 1.5 s\n"
    )


def test_a_server_that_is_silent_is_an_error_after_the_timeout(server):
    server.faults = [lambda handler: time.sleep(1.0)]
    begin = time.monotonic()
    with pytest.raises(ServerError, match="timed out"):
        complete(server, prompts=[[1]], seeds=[1], timeout=0.2)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("status", [302, 400, 401, 404, 422])
def test_a_request_that_is_refused_is_not_repeated(server, status):
    server.faults = [status] * 99
    with pytest.raises(ServerError, match=rf"status {status}\n.*not now"):
        complete(server, prompts=[[1]], seeds=[1])
    assert len(server.bodies) == 1


def test_one_prompt_that_is_refused_is_an_error_of_the_whole_call(server):
    server.faults = [None, None, 400]
    with pytest.raises(ServerError, match="status 400"):
        complete(server)


# --- servers that are something else


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://127.0.0.1:9/v1", "ConnectionRefusedError|Connection refused"),
        ("localhost:8000/v1", "unknown url type"),
        ("http://no-such-host.invalid/v1", "URLError|gaierror"),
    ],
)
def test_a_wrong_url_is_an_error_at_once(url, problem):
    with pytest.raises(ServerError, match=problem):
        OpenAIServer(url, "tiny")


def test_a_url_without_its_path_and_another_model_are_errors(server):
    with pytest.raises(
        ServerError, match=r"models: status 404\n.*<html>(.|\n)*ends with /v1"
    ):
        OpenAIServer(server.url.removesuffix("/v1"), "tiny")
    with pytest.raises(ServerError, match="did you mean 'tiny-lora'"):
        OpenAIServer(server.url, "tiny-lore")


def changed(**changes):
    """A server whose answers have other values, found by their names."""

    def answer(body):
        made = vllm(body)
        choice = made["choices"][0]
        for name, change in changes.items():
            for part in (made["usage"], choice, choice["logprobs"]):
                if name in part:
                    part[name] = change(part[name])
        return made

    return answer


WRONG = {
    "HTML": (lambda body: "<html>Welcome</html>", r"Error: (.|\n)*<html>Welcome"),
    "not an object": (lambda body: [1], "TypeError"),
    "an error": (lambda body: {"error": {"message": "no"}}, "KeyError: 'choices'"),
    "two choices": (
        lambda body: {**(made := vllm(body)), "choices": made["choices"] * 2},
        "too many values",
    ),
    "no log-probabilities": (changed(logprobs=lambda _: None), "TypeError"),
    "null for one": (changed(token_logprobs=lambda x: [None, *x[1:]]), "TypeError"),
    "too few": (
        changed(token_logprobs=lambda x: x[1:]),
        "log-probabilities and tokens",
    ),
    "logits": (changed(token_logprobs=lambda x: [3.5, *x[1:]]), "<= 3.5"),
    "no ids": (changed(token_ids=lambda _: None), "TypeError"),
    "no stop token": (changed(token_ids=lambda x: x[:-1]), "tokens of usage"),
    "too many": (
        lambda body: vllm({**body, "max_tokens": 9, "stop_token_ids": []}),
        "tokens of usage",
    ),
    "a shorter context": (
        lambda body: vllm({**body, "max_tokens": 1}),
        "context is too short",
    ),
    "another prompt": (changed(prompt_token_ids=lambda x: x[1:]), "another prompt"),
    "a longer prompt": (changed(prompt_tokens=lambda x: x + 1), "another prompt"),
    "an end by text": (changed(stop_reason=lambda _: "NaN happened"), "NaN happened"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_answer_that_is_not_what_was_asked_is_an_error(server, kind):
    server.answer, problem = WRONG[kind]
    with pytest.raises(ServerError, match=problem):
        complete(server, prompts=[[1, 2]], seeds=[1], num_tokens=4, stop_tokens=[])
    assert len(server.bodies) == 1


def test_log_probabilities_of_another_temperature_are_an_error(server):
    """VLLM's are of temperature 1, unless it is started with another mode."""
    server.answer = lambda body: vllm(body, is_raw=True)
    with pytest.raises(ServerError, match="--logprobs-mode processed_logprobs"):
        complete(server, temperature=0.7)
    assert len(server.bodies) == 2
    assert len(complete(server, temperature=1.0)) == 5
    assert len(complete(server, temperature=0.0)) == 5
