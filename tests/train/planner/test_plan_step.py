# SPDX-License-Identifier: Apache-2.0
"""``ts.plan``: the mesh for a step of the user's own."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.errors import PlanError
from tessera.mesh import Mesh

X = jax.ShapeDtypeStruct((12, 64), "float32")
W = jax.ShapeDtypeStruct((64, 32), "float32")


def make_step():
    def step(x, w):
        return x @ w

    return ts.function(step, in_specs={"x": P("dp"), "w": P(None, "tp")})


def test_every_factoring_of_the_named_axes_is_compiled():
    found = ts.plan(make_step(), (X, W), "cpu:4")
    shapes = {tuple(each.mesh.shape.values()) for each in found.meshes}
    assert shapes == {(1, 4), (2, 2), (4, 1)}
    assert found.best is found.meshes[0].mesh
    seconds = [each.timeline.seconds for each in found.meshes]
    assert seconds == sorted(seconds)


def test_a_mesh_that_is_not_legal_is_counted():
    found = ts.plan(make_step(), (X, W), "cpu:8")
    assert {each.mesh.shape["dp"] for each in found.meshes} == {1, 2, 4}
    ((code, _),) = found.rejected
    assert code == "T201"
    assert "not legal: 1 times [T201]" in found.as_text()


def test_candidates_may_be_given():
    meshes = [Mesh(["dp", "tp"], shape=(2, 2), target="cpu:4")]
    (only,) = ts.plan(make_step(), (X, W), "cpu:4", meshes=meshes).meshes
    assert only.mesh is meshes[0]


def test_axes_may_be_given():
    found = ts.plan(make_step(), (X, W), "cpu:2", axes=("tp", "dp"))
    assert {each.mesh.axes for each in found.meshes} == {("tp", "dp")}


def test_a_step_without_axes_is_refused():
    step = ts.function(lambda x: x * 2)
    with pytest.raises(PlanError, match=r"\[T714\] there are no axes to factor"):
        ts.plan(step, X, "cpu:4")


def test_no_legal_mesh_is_an_error_with_the_reasons():
    odd = jax.ShapeDtypeStruct((5, 64), "float32")
    meshes = [Mesh(["dp", "tp"], shape=(4, 1), target="cpu:4")]
    with pytest.raises(PlanError) as caught:
        ts.plan(make_step(), (odd, W), "cpu:4", meshes=meshes)
    assert "[T714] there is no mesh of cpu:4 for this step" in str(caught.value)
    assert "[T201]" in str(caught.value)


def test_too_many_factorings_are_refused():
    with pytest.raises(PlanError, match="too many meshes"):
        ts.plan(make_step(), (X, W), "cpu:512", axes=("a", "b", "c", "d"))
