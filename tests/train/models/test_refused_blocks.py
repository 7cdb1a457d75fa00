# SPDX-License-Identifier: Apache-2.0
"""Which blocks, methods and options of registered models are refused, and why."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tessera.errors import (
    DimTableError,
    ModelDefinitionError,
    PipelineSizeError,
    SettingConflictError,
    SettingValueError,
)
from tessera.train.models import register_model
from tessera.train.models.definition import ModelOptions, definition_of
from tests.train.models.block_models import (
    FUNCTIONS,
    MESH,
    Methods,
    NnxBlocks,
    Sizes,
    functions,
    init_function,
    mesh_of,
)


def problems(target, mesh=MESH, **options):
    definition = definition_of(f"{target.__module__}:{target.__name__}")
    return [*definition.problems(Sizes(), ModelOptions(**options), mesh)]


@pytest.mark.parametrize(
    "options",
    [
        {"sequence_parallel": True},
        {"loss_chunk": 64},
        {"context_parallel": "all_to_all"},
    ],
)
def test_options_that_blocks_do_not_help(options):
    (error,) = problems(NnxBlocks, **options)
    assert isinstance(error, SettingConflictError)


def test_stages_and_policies_that_do_not_exist():
    (error,) = problems(NnxBlocks, mesh_of(pp=4))
    assert isinstance(error, PipelineSizeError)
    (error,) = problems(NnxBlocks, remat="ful")
    assert isinstance(error, SettingValueError)
    (error,) = problems(NnxBlocks, remat={"global": "full"})
    assert isinstance(error, SettingValueError)
    (error,) = problems(NnxBlocks, mesh_of(pp=2), remat=["full", "none", "none"])
    assert isinstance(error, SettingConflictError)
    (error,) = problems(NnxBlocks, mesh_of(cp=2))
    assert isinstance(error, SettingConflictError)


def nnx_model(make_blocks):
    """A model whose blocks a function makes from itself."""

    class Model(Methods, nnx.Module):
        def __init__(self, sizes, *, rngs):
            self.table = nnx.Embed(sizes.vocab_size, sizes.width, rngs=rngs)
            self.layers = nnx.List(make_blocks(self, rngs))

    return refusal(Model)


def refusal(cls, **arguments):
    defaults = {
        "config": Sizes,
        "dims": {"*kernel": "- -", "*": "*"},
        "inputs": ("tokens",),
        "blocks": "layers",
    }
    arguments = defaults | arguments
    if "dims" not in arguments:
        arguments["dims"] = {}
    register_model(**arguments)(cls)
    (error,) = problems(cls)
    return error


class Scaled(nnx.Module):
    def __init__(self, rngs, *, width=8, factor=1.0, table=None, function=jnp.tanh):
        self.dense = nnx.Linear(8, width, use_bias=False, rngs=rngs)
        self.factor, self.function = factor, function
        if table is not None:
            self.table = table

    def __call__(self, hidden):
        return hidden + self.function(self.dense(hidden) * self.factor)


def test_blocks_of_other_shapes_are_refused_by_their_first_difference():
    error = nnx_model(lambda _, rngs: [Scaled(rngs), Scaled(rngs, width=9)])
    assert isinstance(error, ModelDefinitionError)
    assert error.got == (
        "block 0 and block 1: dense/kernel is float32[8, 8] and float32[8, 9]"
    )


def test_blocks_with_other_parameters_are_refused_by_their_first_difference():
    def blocks(_, rngs):
        own = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        return [Scaled(rngs), Scaled(rngs, table=own)]

    error = nnx_model(blocks)
    assert "table/kernel is none and float32[8, 8]" in error.got


@pytest.mark.parametrize(
    ("option", "values", "got"),
    [
        ("factor", (1.0, 2.0), "factor=1.0 and factor=2.0"),
        ("function", (jnp.tanh, jnp.sin), "function="),
        ("function", (lambda x: x, lambda x: x), "function="),
    ],
)
def test_blocks_of_other_static_attributes_are_refused(option, values, got):
    error = nnx_model(lambda _, rngs: [Scaled(rngs, **{option: v}) for v in values])
    assert isinstance(error, ModelDefinitionError)
    assert got in error.got


@pytest.mark.parametrize("owner", ["the rest of the model", "block 0"])
def test_a_parameter_of_two_blocks_or_of_the_rest_is_refused(owner):
    """In a stack it would be as many parameters as there are blocks."""

    def blocks(model, rngs):
        table = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        if owner != "block 0":
            table = model.table
        return [Scaled(rngs, table=table), Scaled(rngs, table=table)]

    error = nnx_model(blocks)
    assert isinstance(error, ModelDefinitionError)
    assert owner in error.got


def test_state_in_a_block_is_refused():
    class Dropped(nnx.Module):
        def __init__(self, rngs):
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, hidden):
            return self.dropout(hidden)

    error = nnx_model(lambda _, rngs: [Dropped(rngs), Dropped(rngs)])
    assert isinstance(error, ModelDefinitionError)
    assert "layers/0/dropout" in error.got


class EquinoxBlock(eqx.Module):
    kernel: jax.Array
    window: int = eqx.field(static=True)
    factor: float = 1.0

    def __call__(self, hidden):
        return hidden + hidden @ self.kernel * self.factor * self.window


@pytest.mark.parametrize(
    ("blocks", "got"),
    [
        ([(1, 1.0), (2, 1.0)], "window=1 and window=2"),
        ([(1, 1.0), (1, 2.0)], "factor=2.0"),
    ],
)
def test_equinox_blocks_of_other_static_values_are_refused(blocks, got):
    class Model(eqx.Module):
        table: jax.Array
        layers: list[EquinoxBlock]

        def __init__(self, sizes, *, key):
            self.table = jax.random.normal(key, (16, 8))
            self.layers = [EquinoxBlock(jnp.eye(8), *block) for block in blocks]

        def embed(self, tokens):
            return self.table[tokens]

        def block(self, block, hidden):
            return block(hidden)

        def head(self, hidden):
            return hidden @ self.table.T

    assert got in refusal(Model).got


@pytest.mark.parametrize(
    ("methods", "got"),
    [
        ({"embed": lambda s, p, tokens: tokens}, "int32[2, 8] for tokens"),
        (
            {"embed": lambda s, p, tokens: (p["table"][tokens],) * 2},
            "float32[2, 8, 8], ",
        ),
        (
            {"embed": lambda s, p, tokens: p["table"][tokens].sum(1)},
            "float32[2, 8] for",
        ),
        (
            {"block": lambda s, p, b, x: x.astype(jnp.bfloat16)},
            "float32[2, 8, 8] before, bfloat16[2, 8, 8] after",
        ),
    ],
)
def test_a_hidden_state_has_one_form(methods, got):
    error = refusal(functions(**methods), **FUNCTIONS)
    assert isinstance(error, ModelDefinitionError)
    assert got in error.got


@pytest.mark.parametrize(
    ("methods", "got"),
    [
        ({"block": lambda s, p, b, x, segment_id=None: x}, "segment_id"),
        ({"block": lambda s, p, b: b}, "block(s, p, b)"),
        ({"embed": lambda s, p, tokens, index: tokens}, "index"),
        ({"head": lambda s, p, x, *more: x}, "more"),
        ({"embed": lambda s, p: p}, "tokens"),
    ],
)
def test_methods_take_nothing_that_a_batch_does_not_have(methods, got):
    with pytest.raises(ModelDefinitionError, match="T407") as caught:
        refusal(functions(**methods), **FUNCTIONS)
    assert got in caught.value.got


def test_a_method_that_is_missing_is_refused():
    with pytest.raises(ModelDefinitionError, match="no method head"):
        refusal(
            type("Model", (), {"embed": functions().embed, "block": functions().block}),
            **FUNCTIONS,
        )


@pytest.mark.parametrize("layers", [0, None])
def test_a_list_without_blocks_is_refused(layers):
    def init(sizes, key):
        params = init_function(sizes, key)
        return {"table": params["table"], "layers": [] if layers == 0 else params}

    error = refusal(functions(), **FUNCTIONS | {"init": init})
    assert isinstance(error, ModelDefinitionError)
    assert "'layers'" in error.got


def test_a_table_that_lays_out_blocks_differently_is_refused():
    dims = {"table": "- -", "layers/1/kernel": "embed -", "*kernel": "- -", "*": "-"}
    error = refusal(functions(), **FUNCTIONS | {"dims": dims})
    assert isinstance(error, DimTableError)
    assert "layers/1/kernel" in error.got
