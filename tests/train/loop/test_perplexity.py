# SPDX-License-Identifier: Apache-2.0
"""Perplexity and its standard error, and ``tessera evaluate``."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.mesh import Mesh
from tessera.train.commands.evaluate import main
from tessera.train.loop.perplexity import _summary, perplexity
from tessera.train.loop.trained_model import open_trained
from tessera.train.models import DecoderConfig, DecoderModel
from tests.train.loop.test_trained_model import MESH, save_run

MODEL = DecoderModel(
    DecoderConfig(
        vocab_size=12,
        d_model=8,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        mlp_dim=8,
        window=3,
        query_pre_attn_scalar=4,
        global_every=2,
    )
)
LENGTH = 8


@pytest.fixture(scope="module")
def params() -> Any:
    draw = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(draw.normal(size=leaf.shape), jnp.float32),
        MODEL.abstract(),
    )


def documents() -> list[np.ndarray]:
    """More rows than one call takes, of several windows and of less than one."""
    draw = np.random.default_rng(1)
    sizes = [1, 2, LENGTH, LENGTH + 1, LENGTH + 2, 3 * LENGTH, *draw.integers(2, 30, 9)]
    return [draw.integers(0, 12, size).astype(np.int32) for size in sizes]


def nats_of(params: Any, ids: np.ndarray) -> float:
    """The reference: each window by itself, without padding."""
    total = 0.0
    for start in range(0, len(ids) - 1, LENGTH):
        window = ids[start : start + LENGTH + 1]
        logits = MODEL.apply(params, jnp.asarray(window[None, :-1]))[0]
        scores = jax.nn.log_softmax(logits)
        total -= float(scores[np.arange(len(window) - 1), window[1:]].sum())
    return total


@pytest.mark.full
def test_windows_count_every_token_but_the_first_once(params: Any) -> None:
    chosen = documents()
    result = perplexity(MODEL, params, chosen, LENGTH)
    tokens = sum(len(ids) - 1 for ids in chosen)
    assert (result.documents, result.tokens) == (len(chosen) - 1, tokens)
    nats = [nats_of(params, ids) for ids in chosen[:6]]
    some = perplexity(MODEL, params, chosen[:6], LENGTH)
    np.testing.assert_allclose(some.nats * some.tokens, sum(nats), rtol=1e-5)
    assert result.value == pytest.approx(np.exp(result.nats))


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(1, 4), (2, 2)])
def test_a_mesh_gives_the_same_perplexity(params: Any, sizes: tuple[int, int]) -> None:
    mesh = Mesh(("fsdp", "tp"), devices=range(4), shape=sizes)
    shardings = jax.tree.map(
        lambda spec: jax.NamedSharding(mesh.jax, spec), MODEL.layouts(mesh)
    )
    expected = perplexity(MODEL, params, documents(), LENGTH)
    sharded = jax.device_put(params, shardings)
    result = perplexity(MODEL, sharded, documents(), LENGTH, mesh)
    assert result.nats == pytest.approx(expected.nats, rel=1e-5)
    assert result.nats_error == pytest.approx(expected.nats_error, rel=1e-4)


def test_the_standard_error_is_that_of_repeated_draws_of_documents() -> None:
    draw = np.random.default_rng(0)

    def drawn() -> Any:
        # The loss of a document depends on its length: tokens are not independent.
        tokens = draw.integers(1, 200, 400)
        means = 2 + 0.5 * draw.normal(size=400) + tokens / 400
        return _summary(np.stack([means * tokens, tokens], axis=1))

    draws = [drawn() for _ in range(400)]
    spread = np.std([one.nats for one in draws])
    assert np.mean([one.nats_error for one in draws]) == pytest.approx(spread, rel=0.1)


def test_equal_documents_have_no_error_and_one_document_has_an_unknown_one() -> None:
    assert _summary(np.array([[4.0, 2.0], [8.0, 4.0]])).nats_error == 0
    assert np.isnan(_summary(np.array([[4.0, 2.0]])).nats_error)


@pytest.mark.full
def test_each_source_of_a_run_has_its_perplexity(tmp_path: Path, capsys: Any) -> None:
    save_run(tmp_path / "run")
    (tmp_path / "one.txt").write_text("hello")
    (tmp_path / "two.jsonl").write_text('{"text": "hello"}\n{"text": "you"}\n')
    files = [str(tmp_path / "one.txt"), str(tmp_path / "two.jsonl")]
    data = [f"--data={file}" for file in files]
    arguments = [str(tmp_path / "run"), *data, "--length=4", "--json"]
    assert main(arguments) == 0
    one, two = map(json.loads, capsys.readouterr().out.splitlines())
    assert (one["data"], one["documents"], one["tokens"]) == (files[0], 1, 5)
    assert (one["error"], one["nats_error"]) == (None, None)
    assert (two["documents"], two["tokens"]) == (2, 8)
    trained = open_trained(tmp_path / "run")
    texts = [np.array([256, *b"hello"]), np.array([256, *b"you"])]
    expected = perplexity(trained.model, trained.read(None), texts, 4)
    assert two["perplexity"] == pytest.approx(expected.value)
    assert two["error"] == pytest.approx(expected.error)
    assert main([*arguments[:-1], f"--mesh={MESH}"]) == 0
    assert f"perplexity {two['perplexity']:.4g}" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--data=no/such/file"], "T601"), (["--data=EMPTY"], "T602")],
)
def test_a_mistake_is_a_coded_error(
    tmp_path: Path, capsys: Any, arguments: list[str], code: str
) -> None:
    save_run(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    words = [word.replace("EMPTY", str(tmp_path / "empty.txt")) for word in arguments]
    assert main([str(tmp_path), *words]) != 0
    assert capsys.readouterr().err.startswith(f"[{code}] ")
    assert main([str(tmp_path), *words, "--length=0"]) != 0
    assert capsys.readouterr().err.startswith("[T401] ")
