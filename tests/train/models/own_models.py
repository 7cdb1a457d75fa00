# SPDX-License-Identifier: Apache-2.0
"""One small model in every framework that ``register_model`` takes."""

from dataclasses import dataclass

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tessera.train.models import register_model


@dataclass(frozen=True)
class Sizes:
    """A table of embeddings, attention without projections, a matmul to logits."""

    vocab_size: int = 16
    width: int = 8


def mixed(x_BSD, segment_ids, positions):
    """Each token's mean of the tokens up to it, of its document."""
    length = x_BSD.shape[1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    mask = (same & jnp.tril(jnp.ones((length, length), bool))).astype(x_BSD.dtype)
    count_BS1 = (positions[..., None] + 1).astype(x_BSD.dtype)
    return jnp.einsum("bst,btd->bsd", mask, x_BSD) / count_BS1


@register_model(
    config=Sizes, dims={"table/embedding": "vocab embed", "head/kernel": "embed vocab"}
)
class NnxModel(nnx.Module):
    def __init__(self, sizes, *, rngs):
        self.table = nnx.Embed(sizes.vocab_size, sizes.width, rngs=rngs)
        self.head = nnx.Linear(sizes.width, sizes.vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, tokens, segment_ids, positions):
        return self.head(mixed(self.table(tokens), segment_ids, positions))


class LinenModel(nn.Module):
    sizes: Sizes

    def setup(self):
        self.table = nn.Embed(self.sizes.vocab_size, self.sizes.width)
        self.head = nn.Dense(self.sizes.vocab_size, use_bias=False)

    def __call__(self, tokens, segment_ids, positions):
        return self.head(mixed(self.table(tokens), segment_ids, positions))


def init_linen(sizes, key):
    inputs = ("tokens", "segment_ids", "positions")
    batch = dict.fromkeys(inputs, jnp.zeros((1, 8), jnp.int32))
    return LinenModel(sizes).init(key, **batch)["params"]


@register_model(
    config=Sizes,
    dims={"table/embedding": "vocab embed", "head/kernel": "embed vocab"},
    init=init_linen,
)
def linen_model(sizes, params, tokens, segment_ids, positions):
    """A module of a library that Tessera does not know."""
    inputs = tokens, segment_ids, positions
    return LinenModel(sizes).apply({"params": params}, *inputs)


@register_model(config=Sizes, dims={"table": "vocab embed", "head": "embed vocab"})
class EquinoxModel(eqx.Module):
    table: jax.Array
    head: jax.Array
    width: int

    def __init__(self, sizes, *, key):
        keys, self.width = jax.random.split(key), sizes.width
        self.table = jax.random.normal(keys[0], (sizes.vocab_size, sizes.width))
        self.head = jax.random.normal(keys[1], (sizes.width, sizes.vocab_size))

    def __call__(self, tokens, segment_ids, positions):
        return mixed(self.table[tokens], segment_ids, positions) @ self.head


def init_function(sizes, key):
    keys = jax.random.split(key)
    return {
        "table": jax.random.normal(keys[0], (sizes.vocab_size, sizes.width)),
        "head": [jax.random.normal(keys[1], (sizes.width, sizes.vocab_size))],
    }


@register_model(
    config=Sizes,
    dims={"table": "vocab embed", "head/0": "embed vocab"},
    init=init_function,
)
def function_model(sizes, params, tokens, segment_ids, positions):
    mean = mixed(params["table"][tokens], segment_ids, positions)
    return mean @ params["head"][0]


ALL = (NnxModel, linen_model, EquinoxModel, function_model)
# Each kind is tried once in `make test`; what all have in common, with two.
TWO = [
    NnxModel,
    function_model,
    pytest.param(linen_model, marks=pytest.mark.full),
    pytest.param(EquinoxModel, marks=pytest.mark.full),
]
