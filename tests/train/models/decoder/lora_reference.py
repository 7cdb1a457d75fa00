# SPDX-License-Identifier: Apache-2.0
"""A decoder with adapters, and the one without them that computes the same."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.foundations.labels import IGNORE_INDEX
from tessera.foundations.tree import named_leaves, nest
from tessera.mesh import Mesh
from tessera.train.models import DecoderConfig, DecoderModel
from tessera.train.models.decoder.config import LoraConfig
from tessera.train.models.partition_rules import NO_MESH

# Of the largest number, in float32.
EXACT = 2e-5
# As multiples of what one unit in the last place of the weights changes, at most, in a
# few draws: adding the adapter to the output instead of to the weight rounds as much,
# in every layer.
ROUNDINGS = 2
DRAWS = 8


def with_lora(config: DecoderConfig, **lora: Any) -> DecoderConfig:
    return dataclasses.replace(config, lora=LoraConfig(**lora))


def random_params(model: DecoderModel, seed: int = 0) -> Any:
    """Parameters none of which is zero; ``s A B`` is half as large as W."""
    draw, lora = np.random.default_rng(seed), model.config.lora
    params = named_leaves(model.init(jax.random.key(seed)))
    for name, leaf in params.items():
        size = 0.1
        if name.endswith("lora_b"):
            size = 1 / (lora.scale * lora.rank**0.5)
        noise = jnp.asarray(draw.normal(size=leaf.shape) * size, jnp.float32)
        params[name] = leaf + noise
    return nest(params)


def merged(model: DecoderModel, params: Any) -> tuple[DecoderModel, Any]:
    """The model without adapters on W + s A B, written with plain einsums."""
    leaves = dict(named_leaves(params))
    for name in sorted(model.adapters):
        if not name.endswith("lora_a"):
            continue
        kernel = name.replace("lora_a", "kernel")
        a, b = leaves.pop(name), leaves.pop(name.replace("lora_a", "lora_b"))
        layers, rank = a.shape[0], a.shape[-1]
        flat = jnp.einsum(
            "lir,lro->lio", a.reshape(layers, -1, rank), b.reshape(layers, rank, -1)
        )
        scale = (model.config.lora.alpha or rank) / rank
        leaves[kernel] = leaves[kernel] + scale * flat.reshape(leaves[kernel].shape)
    plain = dataclasses.replace(model.config, lora=LoraConfig())
    return dataclasses.replace(model, config=plain, frozen=frozenset()), nest(leaves)


def assert_same_as_merged(
    model: DecoderModel, mesh: Mesh | None = None, seed: int = 0
) -> None:
    """Logits, loss and gradients, on a mesh, are those of plain JAX on one device.

    They may differ by rounding, which is measured: it is what the reference changes by
    where each of its weights is rounded otherwise.
    """
    params = random_params(model, seed)
    reference, weights = merged(model, params)
    batch = random_batch(model.config.vocab_size, seed)
    leaves = named_leaves(params)

    def named(results: Any) -> dict[str, np.ndarray]:
        logits, loss, gradients = results
        return {"logits": logits, "loss": loss, **named_leaves(gradients)}

    (ours,) = map(named, computed(model, [params], batch, mesh))
    nudges = [nudged(weights, DRAWS * seed + draw) for draw in range(DRAWS)]
    theirs = list(map(named, computed(reference, [weights, *nudges], batch, None)))
    for name, value in ours.items():
        expected, *others = (
            chain_rule(model, name, leaves, each)
            if name in model.adapters
            else each[name]
            for each in theirs
        )
        rounding = max(np.abs(other - expected).max() for other in others)
        assert_close(value, expected, name, ROUNDINGS * rounding)


def computed(
    model: DecoderModel, trees: Sequence[Any], batch: Any, mesh: Mesh | None
) -> list[Any]:
    """Logits, loss and gradients with each tree of parameters, by one program."""
    place = NO_MESH if mesh is None else model.place(mesh)
    if mesh is not None:
        shardings = jax.tree.map(
            lambda spec: NamedSharding(mesh.jax, spec), model.layouts(mesh)
        )
        trees = [jax.device_put(params, shardings) for params in trees]
        rows = NamedSharding(mesh.jax, P(place.axes("batch") or None))
        batch = jax.device_put(batch, rows)

    def loss(params: Any, batch: Any) -> Any:
        arranged = {name: place.arranged(x) for name, x in batch.items()}
        return model.loss(params, arranged, place, chunk="none")[0]

    @jax.jit
    def both(params: Any, batch: Any) -> Any:
        logits = model.apply(params, batch["tokens"], mesh=mesh)
        return logits, *jax.value_and_grad(loss)(params, batch)

    return [jax.device_get(both(params, batch)) for params in trees]


def nudged(params: Any, seed: int) -> Any:
    """Parameters of which each is one unit in the last place larger or smaller."""
    draw = np.random.default_rng(seed)

    def nudge(leaf: np.ndarray) -> np.ndarray:
        towards = draw.choice(np.float32([-np.inf, np.inf]), leaf.shape)
        return np.nextafter(leaf, towards)

    return jax.tree.map(nudge, jax.device_get(params))


def chain_rule(model: DecoderModel, name: str, params: Any, whole: Any) -> np.ndarray:
    """The gradient of A or B from that of the merged weight."""
    module = name.removesuffix(name[-6:])
    rank = model.config.lora.rank
    scale = (model.config.lora.alpha or rank) / rank
    a, b = (np.asarray(params[f"{module}lora_{x}"]) for x in "ab")
    layers = len(a)
    g = whole[f"{module}kernel"].reshape(layers, a[0].size // rank, -1)
    if name.endswith("lora_a"):
        return scale * (g @ b.reshape(layers, rank, -1).mT).reshape(a.shape)
    return scale * (a.reshape(layers, -1, rank).mT @ g).reshape(b.shape)


def assert_close(
    ours: Any, theirs: Any, what: str, rounding: float | np.floating = 0.0
) -> None:
    largest = np.abs(theirs).max()
    assert largest > 0, what
    most = max(EXACT * largest, rounding)
    np.testing.assert_allclose(ours, theirs, atol=most, rtol=0, err_msg=what)


def random_batch(vocab_size: int, seed: int, rows: int = 4, length: int = 16) -> Any:
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, vocab_size, (rows, length), np.int32)
    targets = np.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORE_INDEX)
    return {
        "tokens": tokens,
        "targets": targets,
        "segment_ids": np.ones((rows, length), np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape),
    }
