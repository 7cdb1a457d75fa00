# SPDX-License-Identifier: Apache-2.0
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.errors import OperandError
from tessera.mesh import Mesh
from tessera.models import DecoderConfig, DecoderModel, generate
from tessera.models.generation import _generate

CONFIG = DecoderConfig(
    vocab_size=12,
    d_model=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    mlp_dim=8,
    window=3,
    query_pre_attn_scalar=4,
    global_every=2,
)
MODEL = DecoderModel(CONFIG)
PROMPT = jnp.array([[1, 2, 3], [4, 5, 6]], jnp.int32)


@pytest.fixture(scope="module")
def params() -> Any:
    draw = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: draw.normal(size=leaf.shape).astype(np.float32), MODEL.abstract()
    )


def test_without_heat_each_token_is_the_likeliest(params: Any) -> None:
    tokens = generate(MODEL, params, PROMPT, 4, jax.random.key(0), temperature=0.0)
    assert tokens.shape == (2, 7)
    assert tokens.dtype == jnp.int32
    np.testing.assert_array_equal(tokens[:, :3], PROMPT)
    # The model is causal: one pass over the result gives every choice at once.
    logits = jax.jit(MODEL.apply)(params, tokens)
    np.testing.assert_array_equal(tokens[:, 3:], logits[:, 2:-1].argmax(-1))


def test_a_sample_follows_from_its_key(params: Any) -> None:
    first, again, other = (
        generate(MODEL, params, PROMPT, 16, jax.random.key(seed)) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert np.any(first != other)
    assert first.min() >= 0
    assert first.max() < CONFIG.vocab_size


def test_top_k_of_one_is_the_likeliest_at_any_heat(params: Any) -> None:
    key = jax.random.key(3)
    hot = generate(MODEL, params, PROMPT, 4, key, temperature=9.0, top_k=1)
    cold = generate(MODEL, params, PROMPT, 4, key, temperature=0.0)
    np.testing.assert_array_equal(hot, cold)


def test_a_sample_is_compiled_once_whatever_key_and_heat(params: Any) -> None:
    generate(MODEL, params, PROMPT, 5, jax.random.key(0))
    compiled = _generate._cache_size()
    generate(
        DecoderModel(CONFIG), params, PROMPT, 5, jax.random.key(1), temperature=0.3
    )
    assert _generate._cache_size() == compiled


def test_sharded_parameters_give_the_same_sample(params: Any) -> None:
    mesh = Mesh(("fsdp", "tp"), devices=range(4), shape=(2, 2))
    sharded = jax.device_put(
        params,
        jax.tree.map(
            lambda spec: jax.NamedSharding(mesh.jax, spec), MODEL.layouts(mesh)
        ),
    )
    key = jax.random.key(0)
    sample = generate(MODEL, sharded, PROMPT, 4, key, temperature=0.0)
    expected = generate(MODEL, params, PROMPT, 4, key, temperature=0.0)
    np.testing.assert_array_equal(sample, expected)


def test_every_argument_out_of_range_is_named(params: Any) -> None:
    with pytest.raises(OperandError) as caught:
        generate(
            MODEL,
            params,
            PROMPT[:, :0],
            0,
            jax.random.key(0),
            temperature=-1.0,
            top_k=13,
        )
    assert str(caught.value) == (
        "[T401] generate cannot sample with these arguments\n"
        "  got: prompt of shape (2, 0)\n"
        "  got: num_tokens = 0\n"
        "  got: temperature = -1.0\n"
        "  got: top_k = 13\n"
        "  fix: a prompt is [batch, length ≥ 1]\n"
        "  fix: num_tokens 1 or more\n"
        "  fix: temperature 0 or more\n"
        "  fix: top_k from 1 to 12, or None\n"
        "  docs: docs/errors/T401.md"
    )
