# SPDX-License-Identifier: Apache-2.0
"""Registered models with repeated blocks: scanned, recomputed, and run in stages.

They are compared with a loop over layers in plain JAX on one device.
"""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.foundations.labels import IGNORE_INDEX
from tessera.foundations.tree import named_leaves
from tessera.graph.jit import function
from tessera.train.loop.pipelined_model import PipelinedModel, schedule_of
from tessera.train.models import register_model
from tessera.train.models.partition_rules import NO_MESH
from tessera.train.rollouts import generate
from tests.train.models.block_models import (
    ALL,
    FUNCTIONS,
    MESH,
    TWO,
    EquinoxBlocks,
    FunctionBlocks,
    NnxBlocks,
    Sizes,
    functions,
    init_function,
    mesh_of,
    model_of,
    plain_logits,
)

KEY = jax.random.key(3)


@cache
def batch_of(rows=8, length=6):
    """Two documents in each row, and one position without a target."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 16, (rows, length), np.int32)
    targets = rng.integers(0, 16, (rows, length), np.int32)
    targets[:, 2] = IGNORE_INDEX
    column = np.arange(length, dtype=np.int32)
    return {
        "tokens": tokens,
        "targets": targets,
        "segment_ids": np.broadcast_to(1 + column // 3, tokens.shape),
        "positions": np.broadcast_to(column % 3, tokens.shape),
    }


def by_role(tree):
    """Table, kernels and biases of stacked parameters, whatever their names."""
    leaves = {name.rpartition("/")[2]: x for name, x in named_leaves(tree).items()}
    table = leaves.get("table", leaves.get("embedding"))
    return table, leaves["kernel"], leaves["bias"]


def plain_loss(roles, batch):
    scores = jax.nn.log_softmax(plain_logits(*roles, batch))
    counts = batch["targets"] != IGNORE_INDEX
    labels = jnp.where(counts, batch["targets"], 0)
    of_label = jnp.take_along_axis(scores, labels[..., None], -1)[..., 0]
    return -jnp.where(counts, of_label, 0.0).sum()


@cache
def expected(target, layers=3):
    """Stacked parameters, and the loss and gradients of the loop over layers."""
    params = jax.device_get(model_of(target, layers=layers).init(KEY))
    gradients = jax.jit(jax.value_and_grad(plain_loss))
    return params, *jax.device_get(gradients(by_role(params), batch_of()))


def assert_expected(target, loss, gradients, layers=3):
    _, want, wanted = expected(target, layers)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    for one, other in zip(by_role(gradients), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def loss_of(model, place, params, batch):
    return model.loss(params, batch, place, chunk="auto")[0]


def gradients_on(target, mesh, remat="none"):
    model = model_of(target, mesh, remat=remat)
    batch, params = batch_of(), expected(target)[0]
    step = jax.value_and_grad(partial(loss_of, model, model.place(mesh)))
    if mesh is None:
        return jax.jit(step)(params, batch)
    layouts = jax.tree.map(partial(NamedSharding, mesh.jax), model.layouts(mesh))
    rows = P(model.place(mesh).axes("batch") or None)
    with mesh:
        placed = jax.device_put(batch, NamedSharding(mesh.jax, rows))
        return jax.jit(step)(jax.device_put(params, layouts), placed)


# --- scan and remat


@pytest.mark.slow(reason="each kind of model is compared with a loop once")
@pytest.mark.parametrize("target", ALL)
def test_loss_and_gradients_are_those_of_a_loop_over_layers(target):
    assert_expected(target, *gradients_on(target, None))


@pytest.mark.parametrize("target", TWO)
def test_a_mesh_changes_neither_loss_nor_gradients(target):
    assert_expected(target, *gradients_on(target, MESH))


@pytest.mark.slow(reason="its first case compiles what the others share")
@pytest.mark.parametrize(
    "remat",
    [
        ["full", "none", "dots"],
        *(pytest.param(p, marks=pytest.mark.full) for p in ("full", "dots")),
    ],
)
def test_recomputed_blocks_have_the_same_gradients(remat):
    assert_expected(NnxBlocks, *gradients_on(NnxBlocks, None, remat))


def test_a_policy_is_what_it_is_for_the_decoder():
    def matmuls(remat):
        model = model_of(NnxBlocks, remat=remat)
        step = jax.grad(partial(loss_of, model, NO_MESH))
        text = str(jax.make_jaxpr(step)(model.abstract(), batch_of()))
        return text.count("dot_general[")

    # Of the one block that is traced: mixed and dense; dots saves both.
    assert matmuls("full") - matmuls("none") == 2
    assert matmuls("dots") == matmuls("none")
    assert model_of(NnxBlocks, remat="full").remat_notes() == ["full in 3 of 3 layers"]


def test_one_block_is_compiled_for_any_number():
    def length(layers):
        model = model_of(NnxBlocks, layers=layers)
        program = jax.make_jaxpr(partial(loss_of, model, NO_MESH))
        return str(program(model.abstract(), batch_of())).count("\n")

    assert length(2) == length(9)


def test_parameters_are_stacked_under_the_name_of_the_list():
    names = [sorted(named_leaves(model_of(target).abstract())) for target in ALL]
    dense = ["layers/dense/bias", "layers/dense/kernel", "table/embedding"]
    plain = ["layers/bias", "layers/kernel", "table"]
    assert names == [dense, plain, plain]
    model = model_of(EquinoxBlocks)
    assert model.abstract()["layers"]["kernel"].shape == (3, 8, 8)
    assert model.layouts(MESH)["layers"]["kernel"] == P(None, "fsdp", "tp")


def test_each_layer_begins_with_the_values_that_the_model_gives_it():
    stacked = model_of(FunctionBlocks).init(KEY)["layers"]["kernel"]
    layers = init_function(Sizes(), KEY)["layers"]
    for one, layer in zip(stacked, layers, strict=True):
        np.testing.assert_allclose(one, layer["kernel"], rtol=1e-6)


@pytest.mark.full
def test_it_generates_as_the_loop_would():
    model, row = model_of(FunctionBlocks), [1, 5, 7]
    params = expected(FunctionBlocks)[0]
    found = generate(model, params, [row], 2, KEY, temperature=0.0).tolist()[0]
    for _ in range(2):
        tokens = np.array([row], np.int32)
        batch = {
            "tokens": tokens,
            "segment_ids": np.ones_like(tokens),
            "positions": np.arange(len(row), dtype=np.int32)[None],
        }
        row = [*row, int(plain_logits(*by_role(params), batch)[0, -1].argmax())]
    assert found == row


def test_fsdp_gathers_the_weights_of_one_block_at_a_time():
    model = model_of(FunctionBlocks, vocab_size=64, width=32)
    mesh = mesh_of(fsdp=4)
    rows = NamedSharding(mesh.jax, P("fsdp"))
    with mesh:
        step = jax.jit(partial(loss_of, model, model.place(mesh)))
        batch = jax.device_put(batch_of(), rows)
        text = step.lower(model.init(KEY, mesh), batch).compile().as_text()
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    shapes = {re.search(r"= (\S+?)\{", line).group(1) for line in gathers}
    assert shapes <= {"f32[64,32]", "f32[32,64]", "f32[32,32]", "f32[1,32,32]"}
    assert len(shapes) >= 2
    assert " all-to-all(" not in text


@pytest.mark.full
def test_the_gathered_weights_of_all_blocks_are_never_in_memory_together():
    """The backward pass gathers them again, although nothing else is recomputed."""
    model = model_of(FunctionBlocks, width=128, layers=16)
    mesh = mesh_of(fsdp=4)
    layouts = jax.tree.map(partial(NamedSharding, mesh.jax), model.layouts(mesh))
    params = jax.device_put(jax.device_get(model.init(KEY)), layouts)
    with mesh:
        gradients = jax.grad(partial(loss_of, model, model.place(mesh)))
        step = jax.jit(gradients, out_shardings=layouts)
        batch = jax.device_put(batch_of(), NamedSharding(mesh.jax, P("fsdp")))
        compiled = step.lower(params, batch).compile()
    assert (
        compiled.memory_analysis().temp_size_in_bytes
        < params["layers"]["kernel"].nbytes
    )


# --- pipelines


def pipelined(
    target, mesh, schedule="1f1b", chunks=1, remat="none", layers=3, gathers_once=False
):
    """Loss and gradients, without stages, of four microbatches."""
    model = model_of(target, mesh, chunks=chunks, remat=remat, layers=layers)
    table = schedule_of(mesh, schedule, chunks, 4)
    step = PipelinedModel(model, mesh, table, gathers_once=gathers_once)
    layouts = jax.tree.map(partial(NamedSharding, mesh.jax), model.layouts(mesh))
    stored = jax.device_get(model.stored(expected(target, layers)[0]))
    params = jax.device_put(stored, layouts)
    micros = {name: x.reshape(4, 2, -1) for name, x in batch_of().items()}
    rows = P(None, model.place(mesh).axes("batch") or None)

    @function(mesh=mesh, in_specs={"micros": rows})
    def run(params, micros):
        return step.gradients(params, micros, jnp.float32(1.0))

    sums, gradients = run(params, micros)
    return sums["loss"], model.plain(jax.device_get(gradients))


@pytest.mark.full
@pytest.mark.parametrize("target", ALL)
def test_stages_have_the_gradients_of_the_loop(target):
    """Three blocks on two stages; both read the tied table, whose gradient is a sum."""
    assert_expected(target, *pipelined(target, mesh_of(pp=2)))


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "schedule", "options"),
    [
        ({"dp": 2, "pp": 2}, "gpipe", {}),
        ({"pp": 2, "fsdp": 2}, "gpipe", {"gathers_once": True}),
        ({"pp": 2, "fsdp": 2, "tp": 2}, "zero_bubble", {"remat": "full"}),
        ({"pp": 2}, "interleaved", {"chunks": 2, "layers": 5}),
    ],
)
def test_stages_on_larger_meshes_and_by_other_schedules(sizes, schedule, options):
    found = pipelined(NnxBlocks, mesh_of(**sizes), schedule, **options)
    assert_expected(NnxBlocks, *found, layers=options.get("layers", 3))


@pytest.mark.full
def test_a_table_that_stages_share_is_stored_by_all_of_them():
    """Each stores a part of its width, which is gathered once in a step."""
    dims = {"table": "vocab table", "*kernel": "embed mlp", "*bias": "mlp"}
    options = {"init": init_function, "dims": dims, "blocks": "layers"}

    class Shared(FunctionBlocks):
        pass

    register_model(config=Sizes, **options)(Shared)
    mesh = mesh_of(pp=2, fsdp=2)
    assert model_of(Shared, mesh).layouts(mesh)["table"] == P(None, ("fsdp", "pp"))
    assert_expected(Shared, *pipelined(Shared, mesh))


def test_stages_are_of_about_equal_cost():
    model = model_of(FunctionBlocks, mesh_of(pp=2), layers=4)
    costs, head = model.layer_costs
    # A block: the mixing of 8 tokens and a matmul of 8 x 8; the head: one of 8 x 16.
    assert costs[0] == pytest.approx((8 * 8 + 8 * 8) / 1e6, rel=0.6)
    assert head == pytest.approx(8 * 16 / 1e6, rel=0.01)
    assert sum(map(len, model.split.layers)) == 4
    assert model.abstract()["layers"]["kernel"].shape[:2] == (1, 2)


# --- what blocks may close over


ARRAY = jnp.linspace(0.0, 1.0, 8)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [None, mesh_of(pp=2)])
def test_a_block_may_close_over_an_array(mesh):
    def block(sizes, params, block, hidden):
        return hidden @ block["kernel"] + block["bias"] * ARRAY

    Model = functions(block=block)
    register_model(config=Sizes, inputs=("tokens",), blocks="layers", **FUNCTIONS)(
        Model
    )
    params = model_of(Model).init(KEY)
    hidden = params["table"][batch_of()["tokens"]]
    for kernel, bias in zip(
        *(params["layers"][n] for n in ("kernel", "bias")), strict=True
    ):
        hidden = hidden @ kernel + bias * ARRAY
    scores = jax.nn.log_softmax(hidden @ params["table"].T)
    targets = batch_of()["targets"]
    of_label = jnp.take_along_axis(scores, targets[..., None] % 16, -1)[..., 0]
    want = -jnp.where(targets == IGNORE_INDEX, 0.0, of_label).sum()
    if mesh is None:
        found = loss_of(model_of(Model), NO_MESH, params, batch_of())
    else:
        model = model_of(Model, mesh)
        step = PipelinedModel(model, mesh, schedule_of(mesh, "1f1b", 1, 4))
        run = function(step.sums, mesh=mesh)
        found = run(model.stored(params), batch_of())["loss"]
    np.testing.assert_allclose(found, want, rtol=1e-5)
