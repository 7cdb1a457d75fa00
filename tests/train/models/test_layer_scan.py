# SPDX-License-Identifier: Apache-2.0
"""What a layer recomputes: the same gradients, less memory, more matmuls."""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.errors import SettingConflictError, SettingValueError
from tessera.train.models import DecoderModel
from tessera.train.models.layer_scan import (
    POLICIES,
    policies_of,
    policies_of_stage,
    scan_layers,
)
from tessera.train.models.pipeline_stages import StageSplit
from tests.small_model import SMALL

CONFIG = dataclasses.replace(SMALL, num_layers=4)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 16), np.int32)

# Of a layer: query, key, value and output, the two of attention, three of the MLP. Of
# the rest: the logits.
FORWARD = 9


# --- which policy each layer has


@pytest.mark.parametrize(
    ("remat", "expected"),
    [
        ("none", ("none",) * 4),
        ("full", ("full",) * 4),
        (["full", "none", "dots", "none"], ("full", "none", "dots", "none")),
        ({"global": "full"}, ("none", "full", "none", "full")),
        ({"local": "dots", "global": "full"}, ("dots", "full", "dots", "full")),
        ({}, ("none",) * 4),
    ],
)
def test_every_layer_has_a_policy(remat, expected):
    assert policies_of(remat, CONFIG.layer_kinds) == expected


def test_a_model_with_any_form_of_it_is_hashable():
    as_list = DecoderModel(CONFIG, remat=["none", "full", "none", "full"])
    as_dict = DecoderModel(CONFIG, remat={"global": "full"})
    assert hash(as_list) == hash(as_dict)
    assert as_list == as_dict != DecoderModel(CONFIG, remat="full")


def test_the_names_of_jax_are_its_policies():
    for name, policy in POLICIES.items():
        if name not in ("full", "dots", "named"):
            assert policy is getattr(jax.checkpoint_policies, name)


@pytest.mark.parametrize(
    ("remat", "message"),
    [
        (
            "ful",
            "[T502] there is no remat policy 'ful'\n"
            "  got: remat=ful\n"
            "  fix: did you mean 'full'? Known: 'none', 'full', 'dots', 'named', "
            "'nothing_saveable', 'everything_saveable', 'dots_saveable', "
            "'dots_with_no_batch_dims_saveable'\n"
            "  docs: https://tessera-spmd.github.io/tessera/errors/T502.html",
        ),
        (
            ["full", "none"],
            "[T502] a list of remat policies needs one for each layer\n"
            "  got: remat=['full', 'none']: 2 policies, 4 layers\n"
            "  fix: give 4, or one name for all layers, or {global: full, local: none}"
            "\n  docs: https://tessera-spmd.github.io/tessera/errors/T502.html",
        ),
        (
            {"globl": "full"},
            "[T502] there is no remat kind of layer 'globl'\n"
            "  got: remat={'globl': 'full'}\n"
            "  fix: did you mean 'global'? Known: 'global', 'local'\n"
            "  docs: https://tessera-spmd.github.io/tessera/errors/T502.html",
        ),
        (
            7,
            "[T502] there is no remat policy 7\n"
            "  got: remat=7\n"
            "  fix: Known: 'none', 'full', 'dots', 'named', 'nothing_saveable', "
            "'everything_saveable', 'dots_saveable', "
            "'dots_with_no_batch_dims_saveable'\n"
            "  docs: https://tessera-spmd.github.io/tessera/errors/T502.html",
        ),
    ],
    ids=["unknown", "too_few", "kind", "number"],
)
def test_a_policy_that_is_none_is_refused(remat, message):
    with pytest.raises(SettingValueError) as caught:
        policies_of(remat, CONFIG.layer_kinds)
    assert str(caught.value) == message


def test_the_layers_of_a_stage_share_a_policy():
    halves = StageSplit(2, (range(2), range(2, 4)))
    assert policies_of_stage(("full",) * 4, halves) == ("full", "full")
    assert policies_of_stage(("full", "none") * 2, halves) == ("full", "none")
    # A stage with a layer less has padding in its place.
    uneven = StageSplit(2, (range(3), range(3, 5)))
    policies = ("full", "none", "dots", "full", "none")
    assert policies_of_stage(policies, uneven) == ("full", "none", "dots")
    mixed = policies_of({"global": "full"}, CONFIG.layer_kinds)
    assert policies_of_stage(mixed, None) == mixed
    with pytest.raises(SettingConflictError) as caught:
        policies_of_stage(("full", "none", "dots", "none"), halves)
    assert caught.value.code == "T507"


# --- what it changes


def loss(model: DecoderModel, params: Any) -> jax.Array:
    return jnp.square(model.apply(params, TOKENS)).mean()


@cache
def params() -> Any:
    return DecoderModel(CONFIG).init(jax.random.key(0))


@cache
def compiled(remat: Any, **sizes: Any) -> Any:
    model = DecoderModel(dataclasses.replace(CONFIG, **sizes), remat=remat)
    step = jax.jit(jax.grad(lambda params: loss(model, params)))
    return step.lower(params()).compile()


def gradients(remat: Any) -> Any:
    return compiled(remat)(params())


def matmuls(remat: Any, **sizes: Any) -> int:
    """Matmuls that the lowered program runs, those of a layer times its layers."""
    model = DecoderModel(dataclasses.replace(CONFIG, **sizes), remat=remat)
    program = jax.make_jaxpr(jax.grad(lambda params: loss(model, params)))(params())
    return count(program.jaxpr)


def count(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        times = equation.params.get("length", 1)
        total += equation.primitive is jax.lax.dot_general_p
        branches = equation.params.get("branches", ())
        total += max((count(branch.jaxpr) for branch in branches), default=0)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += times * count(inner)
    return total


@pytest.mark.full
@pytest.mark.parametrize(
    "remat",
    [
        ("full",) * 2 + ("none",) * 2,
        pytest.param("full", marks=pytest.mark.full),
        pytest.param("dots", marks=pytest.mark.full),
        pytest.param("dots_with_no_batch_dims_saveable", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_gradients_are_the_same(remat):
    for got, want in zip(
        jax.tree.leaves(gradients(remat)),
        jax.tree.leaves(gradients("none")),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("unroll", [1, 2])
def test_full_runs_the_matmuls_of_every_layer_once_more(unroll):
    layers = CONFIG.num_layers
    # The gradient of attention makes the scores again.
    usual = 3 * (layers * FORWARD + 1) + layers
    assert matmuls("none", scan_unroll=unroll) == usual
    again = matmuls("full", scan_unroll=unroll) - usual
    # The last of each half as well: a norm follows it.
    assert again == layers * FORWARD


@pytest.mark.full
def test_dots_runs_no_matmul_twice():
    assert matmuls("dots") == matmuls("none")


@pytest.mark.slow(reason="it traces two models")
def test_matmuls_with_batch_dims_are_those_of_attention():
    again = matmuls("dots_with_no_batch_dims_saveable") - matmuls("none")
    assert again == 2 * CONFIG.num_layers


def test_layers_with_a_policy_of_their_own_recompute_by_themselves():
    again = matmuls(("full", "none", "none", "full")) - matmuls("none")
    assert again == 2 * FORWARD


@pytest.mark.full
def test_what_is_not_kept_takes_no_memory():
    sizes = {
        str(remat): compiled(remat).memory_analysis().temp_size_in_bytes
        for remat in ("none", "dots", "named", "full")
    }
    none, dots, named, full = sizes.values()
    assert full < named < dots < none
    assert full < none / 2


def test_results_of_layers_are_stacked_across_runs_of_policies():
    def body(carry: jax.Array, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        return carry * layer, carry + layer

    layers = jnp.arange(1.0, 5.0)
    want = jax.lax.scan(body, jnp.float32(2), layers)
    got = scan_layers(body, jnp.float32(2), layers, ("full", "full", "none", "full"))
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])
