# SPDX-License-Identifier: Apache-2.0
"""One model with repeated blocks in every framework that ``register_model`` takes.

The embedding is tied to the head. A block mixes the tokens of each document, then adds
a matmul, scaled by its number, and a part of the embedding table's mean, which all
blocks share.
"""

import math
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tessera.mesh import Mesh
from tessera.train.models import register_model
from tessera.train.models.definition import ModelOptions, definition_of
from tests.train.models.own_models import mixed


@dataclass(frozen=True)
class Sizes:
    vocab_size: int = 16
    width: int = 8
    layers: int = 3


def block_of(kernel, bias, mean, hidden, segment_ids, positions, index):
    """The formula of a block, for all frameworks and for plain JAX."""
    inner = mixed(hidden, segment_ids, positions) @ kernel + bias
    scale = 1.0 / (1 + index).astype(hidden.dtype)
    return hidden + scale * jnp.tanh(inner) + mean


def plain_logits(table, kernels, biases, batch):
    """A loop over layers, without a framework."""
    hidden = table[batch["tokens"]]
    for index, (kernel, bias) in enumerate(zip(kernels, biases, strict=True)):
        rest = batch["segment_ids"], batch["positions"], jnp.int32(index)
        hidden = block_of(kernel, bias, table.mean(0), hidden, *rest)
    return hidden @ table.T


DIMS = {
    "table/embedding": "vocab embed",
    "layers*/dense/kernel": "embed mlp",
    "layers*/dense/bias": "mlp",
}


class NnxBlock(nnx.Module):
    def __init__(self, sizes, rngs):
        self.dense = nnx.Linear(sizes.width, sizes.width, rngs=rngs)


@register_model(config=Sizes, dims=DIMS, blocks="layers")
class NnxBlocks(nnx.Module):
    def __init__(self, sizes, *, rngs):
        self.table = nnx.Embed(sizes.vocab_size, sizes.width, rngs=rngs)
        self.layers = nnx.List([NnxBlock(sizes, rngs) for _ in range(sizes.layers)])

    def embed(self, tokens):
        return self.table(tokens)

    def block(self, block, hidden, **inputs):
        kernel, bias = block.dense.kernel[...], block.dense.bias[...]
        inputs.pop("tokens")
        return block_of(
            kernel, bias, self.table.embedding[...].mean(0), hidden, **inputs
        )

    def head(self, hidden):
        return self.table.attend(hidden)


class EquinoxBlock(eqx.Module):
    kernel: jax.Array
    bias: jax.Array


@register_model(
    config=Sizes,
    dims={
        "table": "vocab embed",
        "layers/*/kernel": "embed mlp",
        "layers/*/bias": "mlp",
    },
    blocks="layers",
)
class EquinoxBlocks(eqx.Module):
    table: jax.Array
    layers: list[EquinoxBlock]

    def __init__(self, sizes, *, key):
        params = init_function(sizes, key)
        self.table = params["table"]
        self.layers = [EquinoxBlock(**block) for block in params["layers"]]

    def embed(self, tokens):
        return self.table[tokens]

    def block(self, block, hidden, segment_ids, positions, index):
        mean = self.table.mean(0)
        rest = segment_ids, positions, index
        return block_of(block.kernel, block.bias, mean, hidden, *rest)

    def head(self, hidden):
        return hidden @ self.table.T


def init_function(sizes, key):
    first, *keys = jax.random.split(key, sizes.layers + 1)
    shape = (sizes.width, sizes.width)
    return {
        "table": jax.random.normal(first, (sizes.vocab_size, sizes.width)),
        "layers": [
            {"kernel": jax.random.normal(k, shape) / 3, "bias": jnp.ones(shape[:1])}
            for k in keys
        ],
    }


@register_model(
    config=Sizes,
    dims={
        "table": "vocab embed",
        "layers/*/kernel": "embed mlp",
        "layers/*/bias": "mlp",
    },
    init=init_function,
    blocks="layers",
)
class FunctionBlocks:
    @staticmethod
    def embed(sizes, params, tokens):
        return params["table"][tokens]

    @staticmethod
    def block(sizes, params, block, hidden, segment_ids, positions, index):
        mean = params["table"].mean(0)
        rest = segment_ids, positions, index
        return block_of(block["kernel"], block["bias"], mean, hidden, *rest)

    @staticmethod
    def head(sizes, params, hidden):
        return hidden @ params["table"].T


ALL = (NnxBlocks, EquinoxBlocks, FunctionBlocks)
# Each kind is tried once in `make test`; what all have in common, with two.
TWO = [
    NnxBlocks,
    FunctionBlocks,
    pytest.param(EquinoxBlocks, marks=pytest.mark.full),
]


def mesh_of(**sizes):
    devices = range(math.prod(sizes.values()))
    return Mesh([*sizes], devices=devices, shape=[*sizes.values()])


MESH = mesh_of(fsdp=2, tp=2)


def model_of(target, mesh=None, *, remat="none", chunks=1, **sizes):
    definition = definition_of(f"{target.__module__}:{target.__name__}")
    options = ModelOptions(remat=remat, pipeline_chunks=chunks)
    return definition.build(definition.configure(sizes), options, mesh)


class Methods:
    """The three methods of a model with a table that is also its head."""

    def embed(self, tokens):
        return self.table(tokens)

    def block(self, block, hidden):
        return block(hidden)

    def head(self, hidden):
        return self.table.attend(hidden)


def functions(embed=None, block=None, head=None):
    """A model of plain functions, of which a test may exchange any."""

    class Model:
        def embed(sizes, params, tokens):
            return params["table"][tokens]

        def block(sizes, params, block, hidden):
            return hidden @ block["kernel"] + block["bias"]

        def head(sizes, params, hidden):
            return hidden @ params["table"].T

    for name, method in {"embed": embed, "block": block, "head": head}.items():
        if method is not None:
            setattr(Model, name, method)
    return Model


FUNCTIONS = {
    "init": init_function,
    "dims": {"table": "- -", "*kernel": "- -", "*": "-"},
}
