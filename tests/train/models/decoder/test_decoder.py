# SPDX-License-Identifier: Apache-2.0
"""The architecture against a reference written from the paper, one loop at a time."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.errors import ParameterTreeError
from tessera.train.models import DecoderConfig, DecoderModel

# Every feature at once: grouped queries, a window shorter than the sequence, local
# layers around a global one with scaled rope, a query scale that is not head_dim.
CONFIG = DecoderConfig(
    vocab_size=31,
    d_model=12,
    num_layers=7,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=20,
    window=5,
    query_pre_attn_scalar=7.0,
    rope_scale_global=8.0,
)
BATCH, LENGTH = 2, 13
MODEL = DecoderModel(CONFIG)
# Half the time to compile, the same arithmetic.
QUICK = {"xla_backend_optimization_level": 0}
apply = jax.jit(MODEL.apply, compiler_options=QUICK)


def rms_norm(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * (1 + w)


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def rotated(vector: np.ndarray, position: int, base: float, scale: float) -> np.ndarray:
    out, half = vector.copy(), len(vector) // 2
    for k in range(half):
        angle = position / scale / base ** (2 * k / len(vector))
        a, b = vector[k], vector[k + half]
        out[k] = a * math.cos(angle) - b * math.sin(angle)
        out[k + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def attention(
    x: np.ndarray, p: Any, layer: int, positions: np.ndarray, segments: np.ndarray
) -> np.ndarray:
    """One sequence: [S, D] to [S, D]."""
    c, sees_all = CONFIG, (layer + 1) % CONFIG.global_every == 0
    base = c.rope_base_global if sees_all else c.rope_base_local
    scale = c.rope_scale_global if sees_all else 1.0
    out = np.zeros_like(x)
    for head in range(c.num_heads):
        group = head // (c.num_heads // c.num_kv_heads)
        q = rms_norm(
            x @ p["query"]["kernel"][layer, :, head], p["query_norm"]["scale"][layer]
        )
        k = rms_norm(
            x @ p["key"]["kernel"][layer, :, group], p["key_norm"]["scale"][layer]
        )
        v = x @ p["value"]["kernel"][layer, :, group]
        q = np.stack(
            [rotated(r, t, base, scale) for r, t in zip(q, positions, strict=True)]
        )
        k = np.stack(
            [rotated(r, t, base, scale) for r, t in zip(k, positions, strict=True)]
        )
        for i in range(len(x)):
            seen = [
                j
                for j in range(i + 1)
                if segments[j] == segments[i] and (sees_all or i - j < c.window)
            ]
            scores = np.exp(k[seen] @ q[i] / math.sqrt(c.query_pre_attn_scalar))
            read = scores / scores.sum() @ v[seen]
            out[i] += read @ p["output"]["kernel"][layer, head]
    return out


def mlp(x: np.ndarray, p: Any, layer: int) -> np.ndarray:
    hidden = gelu(x @ p["gate"]["kernel"][layer]) * (x @ p["up"]["kernel"][layer])
    return hidden @ p["down"]["kernel"][layer]


def reference(
    params: Any, tokens: np.ndarray, positions: np.ndarray, segments: np.ndarray
) -> np.ndarray:
    """Logits of a batch, in float64."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    d, table = p["decoder"], p["embedding"]
    rows = []
    for row, where, segment in zip(tokens, positions, segments, strict=True):
        x = table[row] * math.sqrt(CONFIG.d_model)
        for i in range(CONFIG.num_layers):
            y = rms_norm(x, d["pre_attention_norm"]["scale"][i])
            y = attention(y, d["attention"], i, where, segment)
            x = x + rms_norm(y, d["post_attention_norm"]["scale"][i])
            y = mlp(rms_norm(x, d["pre_mlp_norm"]["scale"][i]), d["mlp"], i)
            x = x + rms_norm(y, d["post_mlp_norm"]["scale"][i])
        rows.append(rms_norm(x, p["final_norm"]["scale"]) @ table.T)
    return np.stack(rows)


@pytest.fixture(scope="module")
def params() -> Any:
    # Not model.init: its norm scales are zero, and one left out would not be noticed.
    draw = np.random.default_rng(1)

    def values(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        scale = 0.3 if len(leaf.shape) < 3 else 12**-0.5
        return (scale * draw.normal(size=leaf.shape)).astype(np.float32)

    return jax.tree.map(values, MODEL.abstract())


def assert_close(actual: Any, expected: Any) -> None:
    """To 1e-5 of the largest value."""
    atol = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    draw = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (BATCH, LENGTH))
    return draw.astype(np.int32)


COUNT = np.tile(np.arange(LENGTH, dtype=np.int32), (BATCH, 1))
ONE = np.zeros_like(COUNT)
PACKED = np.array([[0] * 4 + [1] * 9, [3] * 1 + [0] * 7 + [2] * 5], np.int32)
RESTARTED = np.array([[*range(4), *range(9)], [0, *range(7), *range(5)]], np.int32)


@pytest.mark.parametrize(
    ("given", "positions", "segments"),
    [
        ({}, COUNT, ONE),
        ({"segment_ids": PACKED}, RESTARTED, PACKED),
        ({"segment_ids": PACKED, "positions": COUNT}, COUNT, PACKED),
        ({"positions": 3 * COUNT + 1}, 3 * COUNT + 1, ONE),
    ],
    ids=["one segment", "packed", "packed with positions", "positions"],
)
def test_logits_are_those_of_the_reference(
    params: Any,
    tokens: np.ndarray,
    given: dict[str, np.ndarray],
    positions: np.ndarray,
    segments: np.ndarray,
) -> None:
    logits = apply(params, tokens, **given)
    assert logits.dtype == jnp.float32
    expected = reference(params, tokens, positions, segments)
    assert_close(logits, expected)


def test_the_future_does_not_reach_the_past(params: Any, tokens: np.ndarray) -> None:
    changed = tokens.copy()
    changed[:, 7:] = (changed[:, 7:] + 1) % CONFIG.vocab_size
    before, after = apply(params, tokens), apply(params, changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert np.all(np.any(before[:, 7:] != after[:, 7:], axis=-1))


def test_a_token_outside_the_vocabulary_is_not_a_number(
    params: Any, tokens: np.ndarray
) -> None:
    wrong = tokens.copy()
    wrong[0, 3] = CONFIG.vocab_size
    logits = apply(params, wrong)
    assert np.all(np.isnan(logits[0, 3:]))
    assert np.all(np.isfinite(logits[1]))


def test_a_narrow_model_has_wide_logits(params: Any, tokens: np.ndarray) -> None:
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    logits = apply(narrow, tokens)
    assert logits.dtype == jnp.float32
    expected = apply(params, tokens)
    assert np.std(logits - expected) < 0.1 * np.std(expected)


@pytest.mark.parametrize("unroll", [2, pytest.param(9, marks=pytest.mark.full)])
def test_unrolling_the_scan_changes_no_result(
    params: Any, tokens: np.ndarray, unroll: int
) -> None:
    unrolled = DecoderModel(dataclasses.replace(CONFIG, scan_unroll=unroll))
    assert_close(
        jax.jit(unrolled.apply, compiler_options=QUICK)(params, tokens),
        apply(params, tokens),
    )


@pytest.mark.full
def test_the_program_does_not_grow_with_depth() -> None:
    def sizes(num_layers: int) -> tuple[int, int]:
        model = DecoderModel(dataclasses.replace(CONFIG, num_layers=num_layers))
        tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)

        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            return model.apply(params, tokens).sum()

        traced = jax.jit(jax.grad(loss)).trace(model.abstract(), tokens)
        hlo = traced.lower().as_text()
        return str(traced.jaxpr).count(" = "), hlo.count("\n")

    assert sizes(6) == sizes(12)


def test_parameters_of_another_model_are_refused(
    params: Any, tokens: np.ndarray
) -> None:
    other = dict(params)
    other["embedding"] = params["embedding"][:-1]
    other["head"] = other.pop("final_norm")
    with pytest.raises(ParameterTreeError) as caught:
        MODEL.apply(other, tokens)
    assert str(caught.value) == (
        "[T306] these are not the parameters of this model\n"
        "  got: 'embedding': (30, 12), expected (31, 12)\n"
        "  got: 'final_norm/scale': missing, expected (12,)\n"
        "  got: 'head/scale': (12,), expected no such parameter\n"
        "  fix: create them with model.init(key), or compare with model.abstract()\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T306.html"
    )
