# SPDX-License-Identifier: Apache-2.0
"""A vocabulary that ``tp`` does not divide: padding has no effect on any number."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tessera.mesh import Mesh
from tessera.train.models import DecoderModel
from tessera.train.rollouts import generate
from tests.small_model import SMALL

WORDS = 61
CONFIG = dataclasses.replace(SMALL, vocab_size=WORDS, num_layers=1, global_every=1)
CONFIGS = {
    "tied": CONFIG,
    "untied": dataclasses.replace(CONFIG, tied_head=False),
    "soft cap": dataclasses.replace(CONFIG, logit_soft_cap=2.0),
}
MESHES = {
    "tp 4": {"tp": 4},
    "fsdp 2 x tp 2": {"fsdp": 2, "tp": 2},
    "dp 2 x tp 4": {"dp": 2, "tp": 4},
}
FAST = "tied", "tp 4", "auto"


def mesh_of(**sizes):
    devices = range(math.prod(sizes.values()))
    return Mesh(tuple(sizes), devices=devices, shape=tuple(sizes.values()))


def batch_of(rows=4, length=8):
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, WORDS, (rows, length + 1)).astype(np.int32)
    tokens[0, :4] = WORDS - 1  # the last row before the padding
    index = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": index,
        "segment_ids": np.ones_like(index),
    }


def loss_and_gradients(model, params, mesh, chunk):
    place = model.place(mesh)

    def loss(params, batch):
        hidden = model.embed(params, batch, place)
        hidden, _ = model.run_blocks(params, hidden, batch, place)
        return model.head_loss(params, hidden, batch, place, chunk=chunk)

    return jax.jit(jax.value_and_grad(loss))(params, batch_of())


def assert_close(got, expected, tolerance=2e-5):
    def check(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())

    jax.tree.map(check, got, expected)


@pytest.mark.slow(reason="it compiles the loss of two meshes")
@pytest.mark.parametrize(
    ("kind", "on", "chunk"),
    [
        FAST,
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in itertools.product(CONFIGS, MESHES, ("auto", "none", 4))
            if case != FAST
        ),
    ],
)
def test_loss_and_gradients_are_those_of_one_device(kind, on, chunk):
    model, mesh = DecoderModel(CONFIGS[kind]), mesh_of(**MESHES[on])
    params = model.init(jax.random.key(0))
    expected = loss_and_gradients(model, params, None, chunk)
    placed = model.init(jax.random.key(0), mesh)
    loss, gradients = loss_and_gradients(model, placed, mesh, chunk)
    assert np.isfinite(loss)
    assert_close((loss, gradients), expected)
    assert gradients["embedding"].shape == (WORDS, CONFIG.d_model)


def test_tables_are_stored_without_padding_and_split_by_columns():
    model, both = DecoderModel(CONFIGS["untied"]), PartitionSpec(None, ("fsdp", "tp"))
    layouts = model.layouts(mesh_of(fsdp=2, tp=2))
    assert layouts["embedding"] == layouts["head"] == both
    # Columns that the axes together do not divide stay with fsdp.
    sizes = {"d_model": 6, "num_heads": 6, "num_kv_heads": 6, "mlp_dim": 12}
    narrow = dataclasses.replace(CONFIG, **sizes)
    model = DecoderModel(narrow)
    mesh = mesh_of(fsdp=2, tp=6)
    assert model.layouts(mesh)["embedding"] == PartitionSpec(None, "fsdp")
    assert model.layout_notes(mesh)[0] == (
        "vocab_size 61 is no multiple of tp 6: a step pads its tables by 5 rows, which "
        "have no probability; they are stored without them, replicated over 'tp'"
    )


@pytest.mark.slow(reason="it compiles the model on a mesh")
def test_logits_have_no_padding_and_a_token_of_it_is_none_of_the_table():
    model, mesh = DecoderModel(CONFIGS["soft cap"]), mesh_of(tp=4)
    tokens = batch_of()["tokens"].copy()
    expected = model.apply(model.init(jax.random.key(0)), tokens)
    tokens[1, 3] = WORDS  # a row of the padding
    placed = model.init(jax.random.key(0), mesh)
    logits = jax.jit(lambda p, t: model.apply(p, t, mesh=mesh))(placed, tokens)
    assert logits.shape == (4, 8, WORDS)
    assert_close(logits[0], expected[0])
    assert jnp.isnan(logits[1, 3]).all()


@pytest.mark.full
def test_generated_tokens_are_those_of_one_device():
    model, mesh = DecoderModel(CONFIGS["untied"]), mesh_of(fsdp=2, tp=4)
    prompt, key = batch_of()["tokens"][:2, :4], jax.random.key(1)
    expected = generate(model, model.init(jax.random.key(0)), prompt, 24, key)
    placed = model.init(jax.random.key(0), mesh)
    np.testing.assert_array_equal(
        generate(model, placed, prompt, 24, key, mesh=mesh), expected
    )
    assert expected.max() < WORDS
