# SPDX-License-Identifier: Apache-2.0
"""Models of flax.nnx, Equinox and functions, as the trainer uses them."""

from dataclasses import dataclass, replace
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.analysis.inspection import inspect
from tessera.errors import (
    AxisReusedError,
    DimTableError,
    ModelDefinitionError,
    ModelShapeError,
    OperandError,
    SettingConflictError,
    ShardDivisibilityError,
    UnknownModelError,
)
from tessera.foundations.labels import IGNORE_INDEX
from tessera.foundations.tree import named_leaves
from tessera.mesh import Mesh
from tessera.train.models import register_model
from tessera.train.models.definition import (
    ModelOptions,
    definition_of,
    registered_model,
)
from tessera.train.models.partition_rules import NO_MESH
from tessera.train.rollouts import generate
from tests.train.models.own_models import (
    ALL,
    TWO,
    Sizes,
    function_model,
    init_function,
    mixed,
)

KEY = jax.random.key(3)
MESH = Mesh(["fsdp", "tp"], devices=range(4), shape=(2, 2))


def model_of(target, **sizes):
    definition = definition_of(f"{target.__module__}:{target.__name__}")
    return definition.build(definition.configure(sizes), ModelOptions(), None)


def batch_of(rows=4, length=6):
    """Two documents in each row, and one position without a target."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 16, (rows, length), np.int32)
    targets = rng.integers(0, 16, (rows, length), np.int32)
    targets[:, 2] = IGNORE_INDEX
    first = np.arange(length) < 2
    return {
        "tokens": tokens,
        "targets": targets,
        "segment_ids": np.broadcast_to(np.where(first, 1, 2), tokens.shape),
        "positions": np.broadcast_to(
            np.where(first, np.arange(length), np.arange(length) - 2), tokens.shape
        ),
    }


def plain_loss(table, head, batch):
    """The same model without a framework, and its loss in nats."""
    x = mixed(table[batch["tokens"]], batch["segment_ids"], batch["positions"])
    scores = jax.nn.log_softmax(x @ head)
    counts = batch["targets"] != IGNORE_INDEX
    labels = jnp.where(counts, batch["targets"], 0)
    of_label = jnp.take_along_axis(scores, labels[..., None], -1)[..., 0]
    return -jnp.where(counts, of_label, 0.0).sum()


def loss_of(model, place, params, batch):
    return model.loss(params, batch, place, chunk="auto")[0]


@pytest.mark.slow(reason="its first case compiles what the others share")
@pytest.mark.parametrize("target", ALL)
def test_loss_and_gradients_are_those_of_the_formula(target):
    model = model_of(target)
    params, batch = model.init(KEY), batch_of()
    (table, head) = sorted(jax.tree.leaves(params), key=lambda leaf: leaf.shape[1])
    loss, gradients = jax.value_and_grad(partial(loss_of, model, NO_MESH))(
        params, batch
    )
    want, wanted = jax.value_and_grad(plain_loss, (0, 1))(table, head, batch)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    found = sorted(jax.tree.leaves(gradients), key=lambda leaf: leaf.shape[1])
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow(reason="its first case compiles what the others share")
@pytest.mark.parametrize("target", TWO)
def test_a_mesh_changes_neither_parameters_nor_loss(target):
    model, batch = model_of(target), batch_of()
    alone, sharded = model.init(KEY), model.init(KEY, MESH)
    for one, other in zip(*map(jax.tree.leaves, (alone, sharded)), strict=True):
        np.testing.assert_array_equal(one, other)
    rows = jax.device_put(batch, NamedSharding(MESH.jax, P("fsdp")))
    with MESH:
        loss = jax.jit(partial(loss_of, model, model.place(MESH)))(sharded, rows)
    np.testing.assert_allclose(loss, loss_of(model, NO_MESH, alone, batch), rtol=1e-6)


@pytest.mark.parametrize("target", TWO)
def test_every_device_holds_its_slices_of_the_parameters(target):
    model = model_of(target)
    specs = sorted(map(str, jax.tree.leaves(model.layouts(MESH), is_leaf=is_spec)))
    assert specs == sorted([str(P("tp", "fsdp")), str(P("fsdp", "tp"))])
    whole = inspect(model.init(KEY, MESH))
    assert whole.local_nbytes * 4 == whole.nbytes


def is_spec(node):
    return isinstance(node, P)


def test_parameters_are_named_by_their_paths():
    names = [[*named_leaves(model_of(target).abstract())] for target in ALL]
    assert names == [
        ["head/kernel", "table/embedding"],
        ["head/kernel", "table/embedding"],
        ["head", "table"],
        ["head/0", "table"],
    ]


def test_the_vocabulary_is_the_last_dim_of_the_logits():
    assert model_of(function_model, vocab_size=24).vocab_size == 24


def test_weights_that_fsdp_shards_are_gathered_where_they_are_used():
    """XLA does not exchange activations for them: nothing else crosses fsdp."""
    model = model_of(function_model, vocab_size=64, width=32)
    mesh = Mesh(["fsdp"], devices=range(4))
    batch = jax.device_put(batch_of(rows=8), NamedSharding(mesh.jax, P("fsdp")))
    with mesh:
        step = jax.jit(partial(loss_of, model, model.place(mesh)))
        text = step.lower(model.init(KEY, mesh), batch).compile().as_text()
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    assert all("f32[64,32]" in line or "f32[32,64]" in line for line in gathers)
    assert len(gathers) == 2
    assert " all-to-all(" not in text


def test_a_dim_that_the_mesh_does_not_divide_is_named():
    with pytest.raises(ShardDivisibilityError, match=r"'table'[\s\S]*17"):
        model_of(function_model, vocab_size=17).layouts(MESH)


def test_two_dims_over_one_axis_are_refused_by_the_name_of_the_parameter():
    dims = {"table": "vocab heads", "head/0": "embed vocab"}
    registered(pooled, init=init_function, dims=dims)
    with pytest.raises(AxisReusedError, match=r"'table'[\s\S]*'vocab', 'heads'"):
        model_of(pooled).layouts(MESH)


# --- generation


def continued(model, params, row, count):
    """The most likely tokens, by the logits of a row that grows."""
    row = list(row)
    for _ in range(count):
        tokens = np.array([row], np.int32)
        inputs = {
            "tokens": tokens,
            "segment_ids": np.ones_like(tokens),
            "positions": np.arange(len(row), dtype=np.int32)[None],
        }
        logits = model.logits(params, inputs, NO_MESH)[0, -1]
        row.append(int(np.argmax(logits)))
    return row


@pytest.mark.full
@pytest.mark.parametrize("mesh", [None, MESH])
def test_prompts_of_different_lengths_continue_as_each_does_alone(mesh):
    model = model_of(function_model, vocab_size=32)
    params = model.init(KEY, mesh)
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    found = generate(model, params, prompts, 6, KEY, mesh=mesh, temperature=0.0)
    alone = model.init(KEY)
    wanted = [continued(model, alone, prompt, 6) for prompt in prompts]
    assert [[t for t in row if t >= 0] for row in found.tolist()] == wanted


@pytest.mark.slow(reason="it compiles several programs")
def test_a_model_that_reads_tokens_alone_continues_prompts_of_any_length():
    registered(bigram, init=init_function, dims={"table": "- -", "head/0": "- -"})
    model = model_of(bigram)
    params = model.init(KEY)
    found = generate(model, params, [[1], [2, 3]], 2, KEY, temperature=0.0)
    following = np.argmax(np.asarray(params["table"] @ params["head"]["0"]), axis=-1)
    first = following[[1, 3]]
    assert found[:, 2:].T.tolist() == [first.tolist(), following[first].tolist()]
    with pytest.raises(OperandError, match="cache_dtype"):
        generate(model, params, [[1]], 2, KEY, cache_dtype="bf16")


def bigram(sizes, params, tokens):
    return params["table"][tokens] @ params["head"][0]


# --- what is refused


def problems(target, mesh=MESH, **options):
    definition = definition_of(f"{target.__module__}:{target.__name__}")
    return [*definition.problems(Sizes(), ModelOptions(**options), mesh)]


@pytest.mark.parametrize(
    "options",
    [
        {"sequence_parallel": True},
        {"context_parallel": "all_to_all"},
        {"remat": "full"},
        {"loss_chunk": 64},
    ],
)
def test_options_that_need_the_blocks_of_a_model_are_refused(options):
    (error,) = problems(function_model, **options)
    assert isinstance(error, SettingConflictError)


@pytest.mark.parametrize("axis", ["pp", "cp"])
def test_mesh_axes_that_need_the_blocks_of_a_model_are_refused(axis):
    (error,) = problems(function_model, Mesh([axis], devices=range(2)))
    assert isinstance(error, SettingConflictError)
    assert repr(axis) in str(error)


def registered(cls, **arguments):
    defaults = {"config": Sizes, "dims": {"*": "-"}, "inputs": ("tokens",)}
    return register_model(**defaults | arguments)(cls)


class Dropped(nnx.Module):
    def __init__(self, sizes, *, rngs):
        self.scale = nnx.Param(jnp.zeros(4))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, tokens):
        return self.dropout(self.scale + tokens[..., None].astype(jnp.float32))


class Counting(eqx.Module):
    count: jax.Array

    def __init__(self, sizes, *, key):
        self.count = jnp.zeros((), jnp.int32)

    def __call__(self, tokens):
        return tokens[..., None].astype(jnp.float32)


@pytest.mark.parametrize(
    ("target", "state"),
    [(Dropped, "dropout"), (Counting, "count")],
)
def test_state_that_training_would_lose_is_refused(target, state):
    registered(target)
    (error,) = problems(target)
    assert isinstance(error, ModelDefinitionError)
    assert state in error.got


def half(sizes, key):
    return {"table": jnp.zeros((16, 4), jnp.bfloat16)}


def twice(sizes, key):
    return {"a": {"b": jnp.zeros((16, 4))}, "a/b": jnp.zeros((16, 4))}


def pooled(sizes, params, tokens):
    return jax.tree.leaves(params)[0][tokens].mean(1)


@pytest.mark.parametrize(
    ("init", "got"),
    [
        (half, "table: bfloat16"),
        (twice, "two parameters have one name"),
        (init_function, "float32[2, 16] for tokens [2, 8]"),
    ],
)
def test_parameters_and_logits_have_one_form(init, got):
    registered(pooled, init=init, dims={"*": "- -"})
    (error,) = problems(pooled)
    assert isinstance(error, ModelDefinitionError)
    assert error.got == got


def test_a_table_that_leaves_a_parameter_out_is_refused():
    registered(pooled, init=init_function, dims={"table": "vocab embed"})
    (error,) = problems(pooled)
    assert isinstance(error, DimTableError)


@dataclass(frozen=True)
class Reserved:
    mesh_shape: int = 1


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        ({"config": dict}, "dict"),
        ({"config": Reserved}, "Reserved.mesh_shape"),
        ({"inputs": ("token",)}, "token"),
        ({"inputs": ("tokens", "segment_ids")}, "segment_ids"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_at_once(arguments, got):
    with pytest.raises(ModelDefinitionError, match=got):
        registered(Dropped, **arguments)


def test_what_is_neither_a_module_nor_a_function_is_refused():
    class Plain:
        def __call__(self, tokens):
            return tokens

    registered(Plain)
    (error,) = problems(Plain)
    assert isinstance(error, ModelDefinitionError)


def test_a_configuration_that_its_class_refuses():
    with pytest.raises(ModelShapeError, match=r"model\.widht=8"):
        model_of(function_model, widht=8)


# --- names


def test_a_module_is_imported_by_its_name():
    assert registered_model("tests.train.models.own_models:NnxModel") is not None
    assert registered_model("NnxModel") is registered_model(
        "tests.train.models.own_models:NnxModel"
    )
    assert registered_model("tiny") is None


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("no_such_module:Model", "ModuleNotFoundError"),
        ("tests.train.models.own_models:NnxModle", "NnxModel"),
        ("tests.train.models.own_models:", "NnxModel"),
    ],
)
def test_a_name_that_nothing_registers(name, got):
    with pytest.raises(UnknownModelError, match=got):
        registered_model(name)


def test_a_model_that_ignores_documents_says_so():
    registered(pooled, init=init_function, dims={"*": "- -"})
    assert any("segment_ids" in note for note in model_of(pooled).layout_notes(MESH))
    assert model_of(function_model).layout_notes(MESH) == []
    assert replace(Sizes(), width=4).width == 4
