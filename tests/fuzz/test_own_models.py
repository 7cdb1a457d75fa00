# SPDX-License-Identifier: Apache-2.0
"""Drawn models of functions have on a mesh the loss and gradients that JAX gives alone.

A model is a chain of drawn layers on the embedding: matmuls of two or three dims, with
or without a bias, norms, products of two parts. The table of dims gives each parameter
drawn names, among them none, and the mesh has drawn axes. A chain may also be a block
that repeats, which is scanned, recomputed and run in stages.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.foundations.labels import IGNORE_INDEX
from tessera.foundations.tree import named_leaves
from tessera.graph.jit import function
from tessera.mesh import Mesh
from tessera.train.loop.pipelined_model import PipelinedModel, schedule_of
from tessera.train.models import register_model
from tessera.train.models.definition import ModelOptions, definition_of

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
    x = through_layers(seed, params["layers"], params["table"][tokens])
    return x @ params["head"]


def through_layers(seed, layers, x):
    for (kind, _), layer in zip(layers_of(seed.number), layers, strict=True):
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
    return x


def loss_of_logits(logits, batch, params):
    scores = jax.nn.log_softmax(logits(params, batch["tokens"]))
    counts = batch["targets"] != IGNORE_INDEX
    labels = jnp.where(counts, batch["targets"], 0)[..., None]
    return -jnp.where(counts, jnp.take_along_axis(scores, labels, -1)[..., 0], 0).sum()


def drawn_dims(new, rng):
    dims = {}
    for name, leaf in named_leaves(jax.eval_shape(new, jax.random.key(0))).items():
        kinds = rng.permutation(len(KINDS))[: len(leaf.shape)]
        dims[name] = " ".join(str(rng.choice(KINDS[kind])) for kind in kinds)
    return dims


def drawn_batch(rng):
    batch = {
        "tokens": rng.integers(0, 16, (8, 4), np.int32),
        "targets": rng.integers(0, 16, (8, 4), np.int32),
    }
    batch["targets"][rng.random((8, 4)) < 0.2] = IGNORE_INDEX
    return batch


def drawn_model(seed, rng):
    dims = drawn_dims(partial(init, Seed(seed)), rng)
    register = register_model(config=Seed, dims=dims, inputs=("tokens",), init=init)
    definition = definition_of(f"{__name__}:{register(forward).__name__}")
    return definition.build(Seed(seed), ModelOptions(), None)


@pytest.mark.full
@pytest.mark.fuzz(sample=5, whole=300)
def test_a_mesh_changes_neither_loss_nor_gradients(seed):
    rng = np.random.default_rng(seed)
    model, mesh = drawn_model(seed, rng), MESHES[rng.integers(len(MESHES))]
    batch = drawn_batch(rng)
    alone = init(Seed(seed), jax.random.key(seed))
    plain_loss = partial(loss_of_logits, partial(forward, Seed(seed)), batch)
    want, wanted = jax.value_and_grad(plain_loss)(alone)

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


# --- with repeated blocks

BLOCK_MESHES = [
    None,
    *MESHES[:2],
    Mesh(["pp"], devices=range(2)),
    Mesh(["pp", "fsdp"], devices=range(4), shape=(2, 2)),
    Mesh(["dp", "tp", "pp"], devices=range(8), shape=(2, 2, 2)),
]
SCHEDULES = ["gpipe", "1f1b", "zero_bubble"]
POLICIES = ["none", "full", "dots"]


@dataclass(frozen=True)
class BlockSeed(Seed):
    count: int = 2


def init_blocks(seed, key):
    """Blocks of drawn layers, each of which returns to the width of the residual."""
    first, *keys = jax.random.split(key, seed.count + 1)
    params = init(Seed(seed.number), first)

    def block(key):
        own = init(Seed(seed.number), key)
        shape = own["head"].shape[0], 8
        return {"layers": own["layers"], "back": jax.random.normal(key, shape) / 9}

    table = {"table": params["table"], "head": params["table"].T[:, :16]}
    return {**table, "blocks": [block(key) for key in keys]}


class Blocks:
    def embed(seed, params, tokens):
        return params["table"][tokens]

    def block(seed, params, block, hidden, index):
        inner = through_layers(Seed(seed.number), block["layers"], hidden)
        inner = inner @ block["back"] + params["table"][index % 16]
        return hidden + inner / (2 + index).astype(hidden.dtype)

    def head(seed, params, hidden):
        return hidden @ params["head"] + hidden @ params["table"].T


def loop_over_blocks(seed, params, tokens):
    hidden = Blocks.embed(seed, params, tokens)
    for index, block in enumerate(params["blocks"]):
        hidden = Blocks.block(seed, params, block, hidden, jnp.int32(index))
    return Blocks.head(seed, params, hidden)


def drawn_blocks(seed, rng, mesh):
    """A model of drawn blocks, whose dims have the same names in each."""
    config = BlockSeed(seed, int(rng.integers(2, 6)))
    dims = {
        name.replace("blocks/0/", "blocks/*/"): names
        for name, names in drawn_dims(partial(init_blocks, config), rng).items()
        if not name.startswith("blocks/") or name.startswith("blocks/0/")
    }
    options = {"config": BlockSeed, "inputs": ("tokens",), "init": init_blocks}
    register_model(**options, dims=dims, blocks="blocks")(Blocks)
    definition = definition_of(f"{__name__}:Blocks")
    remat = ModelOptions(remat=str(rng.choice(POLICIES)))
    return config, definition.build(config, remat, mesh)


@pytest.mark.full
@pytest.mark.fuzz(sample=2, whole=300)
def test_blocks_in_a_scan_or_in_stages_have_the_gradients_of_a_loop(seed):
    rng = np.random.default_rng(seed)
    mesh = BLOCK_MESHES[rng.integers(len(BLOCK_MESHES))]
    config, model = drawn_blocks(seed, rng, mesh)
    batch, key = drawn_batch(rng), jax.random.key(seed)
    alone = init_blocks(config, key)
    loss = partial(loss_of_logits, partial(loop_over_blocks, config), batch)
    want, wanted = jax.jit(jax.value_and_grad(loss))(alone)
    wanted = {name: np.asarray(leaf) for name, leaf in named_leaves(wanted).items()}

    params, place = model.init(key, mesh), model.place(mesh)
    if model.split is None:

        def scanned(params, batch):
            return model.loss(params, batch, place, chunk="auto")[0]

        with mesh or nullcontext():
            found, gradients = jax.jit(jax.value_and_grad(scanned))(params, batch)
    else:
        schedule = schedule_of(mesh, str(rng.choice(SCHEDULES)), 1, 4)
        pipeline = PipelinedModel(model, mesh, schedule)
        micros = {name: array.reshape(4, 2, -1) for name, array in batch.items()}
        rows = P(None, place.axes("batch") or None)

        @function(mesh=mesh, in_specs={"micros": rows})
        def step(params, micros):
            return pipeline.gradients(params, micros, jnp.float32(1.0))

        sums, gradients = step(params, micros)
        found = sums["loss"]
    np.testing.assert_allclose(found, want, rtol=1e-5)
    for name, gradient in named_leaves(model.plain(jax.device_get(gradients))).items():
        entry, slash, rest = name.partition("/")
        names = [f"blocks/{i}/{rest}" for i in range(config.count)]
        of_loop = np.stack([wanted[n] for n in names]) if slash else wanted[entry]
        np.testing.assert_allclose(gradient, of_loop, rtol=1e-4, atol=1e-4)
