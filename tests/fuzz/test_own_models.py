# SPDX-License-Identifier: Apache-2.0
"""Drawn models of functions have on a mesh the loss and gradients that JAX gives alone.

A model is a chain of drawn layers on the embedding: matmuls of two or three dims, with
or without a bias, norms, products of two parts. The table of dims gives each parameter
drawn names, among them none, and the mesh has drawn axes.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.labels import IGNORE_INDEX
from tessera.mesh import Mesh
from tessera.models import register_model
from tessera.models.definition import ModelOptions, definition_of
from tessera.tree import named_leaves

MESHES = [
    Mesh(["fsdp", "tp"], devices=range(4), shape=(2, 2)),
    Mesh(["dp", "fsdp"], devices=range(4), shape=(2, 2)),
    Mesh(["tp", "dp"], devices=range(8), shape=(4, 2)),
    Mesh(["ep", "tp"], devices=range(4), shape=(2, 2)),
]
# At most one of each: two dims of a parameter cannot be sharded over one axis.
KINDS = [["embed"], ["heads", "mlp", "vocab"], ["experts"], ["norm", "-"], ["-"]]
WIDTHS = [16, 32]


@dataclass(frozen=True)
class Seed:
    number: int = 0


def layers_of(seed):
    """Kinds and widths of a model's layers."""
    rng = np.random.default_rng(seed)
    kinds = rng.choice(["matmul", "bias", "split", "norm", "gate"], rng.integers(1, 5))
    return [(str(kind), int(rng.choice(WIDTHS))) for kind in kinds]


def init(seed, key):
    keys = iter(jax.random.split(key, 32))

    def drawn(*shape):
        return jax.random.normal(next(keys), shape) / shape[0] ** 0.5

    width, params = 8, {"table": drawn(16, 8), "layers": []}
    for kind, new in layers_of(seed.number):
        if kind == "norm":
            params["layers"].append({"scale": drawn(width)})
            continue
        if kind == "split":
            layer = {"kernel": drawn(width, 4, new // 4)}
        elif kind == "gate":
            layer = {"kernel": drawn(width, new), "gate": drawn(width, new)}
        else:
            layer = {"kernel": drawn(width, new)}
        if kind == "bias":
            layer["bias"] = drawn(new)
        params["layers"].append(layer)
        width = new
    return {**params, "head": drawn(width, 16)}


def forward(seed, params, tokens):
    x = params["table"][tokens]
    for (kind, _), layer in zip(layers_of(seed.number), params["layers"], strict=True):
        if kind == "norm":
            x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-3)
            x = x * layer["scale"]
        elif kind == "split":
            x = jnp.einsum("bsd,dhk->bshk", x, layer["kernel"])
            x = x.reshape(*x.shape[:2], -1)
        elif kind == "gate":
            x = jnp.tanh(x @ layer["gate"]) * (x @ layer["kernel"])
        else:
            x = x @ layer["kernel"] + layer.get("bias", 0.0)
    return x @ params["head"]


def plain_loss(seed, params, batch):
    scores = jax.nn.log_softmax(forward(seed, params, batch["tokens"]))
    counts = batch["targets"] != IGNORE_INDEX
    labels = jnp.where(counts, batch["targets"], 0)[..., None]
    return -jnp.where(counts, jnp.take_along_axis(scores, labels, -1)[..., 0], 0).sum()


def drawn_model(seed, rng):
    shapes = named_leaves(jax.eval_shape(lambda: init(Seed(seed), jax.random.key(0))))
    dims = {}
    for name, leaf in shapes.items():
        kinds = rng.permutation(len(KINDS))[: len(leaf.shape)]
        dims[name] = " ".join(str(rng.choice(KINDS[kind])) for kind in kinds)
    register = register_model(config=Seed, dims=dims, inputs=("tokens",), init=init)
    definition = definition_of(f"{__name__}:{register(forward).__name__}")
    return definition.build(Seed(seed), ModelOptions(), None)


@pytest.mark.fuzz(sample=10, whole=300)
def test_a_mesh_changes_neither_loss_nor_gradients(seed):
    rng = np.random.default_rng(seed)
    model, mesh = drawn_model(seed, rng), MESHES[rng.integers(len(MESHES))]
    batch = {
        "tokens": rng.integers(0, 16, (8, 4), np.int32),
        "targets": rng.integers(0, 16, (8, 4), np.int32),
    }
    batch["targets"][rng.random((8, 4)) < 0.2] = IGNORE_INDEX
    alone = init(Seed(seed), jax.random.key(seed))
    want, wanted = jax.value_and_grad(lambda p: plain_loss(Seed(seed), p, batch))(alone)

    place = model.place(mesh)
    rows = jax.device_put(
        batch, NamedSharding(mesh.jax, P(place.axes("batch") or None))
    )
    params = model.init(jax.random.key(seed), mesh)

    def loss(params, rows):
        return model.loss(params, rows, place, chunk="auto")[0]

    with mesh:
        found, gradients = jax.jit(jax.value_and_grad(loss))(params, rows)
    np.testing.assert_allclose(found, want, rtol=1e-5)
    wanted = named_leaves(wanted)
    for name, gradient in named_leaves(gradients).items():
        np.testing.assert_allclose(gradient, wanted[name], rtol=1e-4, atol=1e-5)
