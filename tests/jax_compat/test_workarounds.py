# SPDX-License-Identifier: Apache-2.0
"""Programs compiled so that known errors of XLA do not reach their values."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera import op
from tessera.graph.lower.lower_to_jit import options_of
from tessera.jax_compat.workarounds import CorrectJit, correct_options
from tessera.mesh import Mesh
from tessera.tracing.scope import Plan

ROWS = np.arange(3 * 32_769, dtype=np.float32).reshape(-1, 3) % 97.0
OPTION = "xla_cpu_experimental_ynn_fusion_type"


def norms(rows):
    return jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2))(rows)


def kernel(rows):
    with Mesh(["dp"], devices=range(1)):
        return op.kernel(norms)(rows)


DOORS = {
    "function": ts.function(norms),
    "function on a mesh": ts.function(norms, mesh=Mesh(["dp"], devices=range(1))),
    "kernel": kernel,
    "jit": CorrectJit(norms),
}


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("door", DOORS)
def test_the_last_of_many_rows_is_right_on_cpus(door):
    np.testing.assert_allclose(DOORS[door](ROWS), (ROWS**2).sum(1), rtol=1e-6)


@pytest.mark.parametrize(
    ("version", "platform", "flags", "is_set"),
    [
        ((0, 10, 2), "cpu", "", True),
        ((0, 10, 2), "cpu", f"--{OPTION}=", False),
        ((0, 10, 2), "gpu", "", False),
        ((0, 11, 2), "cpu", "", False),
    ],
)
def test_the_option_is_for_cpus_of_one_version_unless_the_user_sets_it(
    version, platform, flags, is_set, monkeypatch
):
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert (OPTION in correct_options(platform)) is is_set


def test_an_option_of_the_step_holds(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    graph = ts.function(norms).trace(ROWS).graph
    assert options_of(graph)[OPTION] != ""
    mine = replace(graph, plan=Plan(compiler_options=((OPTION, ""),)))
    assert options_of(mine) == {OPTION: ""}


def test_a_part_of_a_traced_program_has_no_options_of_its_own():
    doubled = CorrectJit(lambda x: 2.0 * x)
    x = jnp.ones(3)
    for result in (jax.jit(doubled)(x), jax.vmap(doubled)(x), doubled(x)):
        np.testing.assert_array_equal(result, 2.0 * x)
    assert jax.grad(lambda x: doubled(x).sum())(x)[0] == 2.0
