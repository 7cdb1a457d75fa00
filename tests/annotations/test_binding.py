# SPDX-License-Identifier: Apache-2.0
"""One call against the annotations of a function: its arguments, then its result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, TypedDict  # noqa: UP035

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import tessera as ts
from tessera.annotations import bind
from tessera.errors import AnnotationError, DimError

# ruff: noqa: UP006, UP045, F821 - old forms of annotations are read, too

FIX = (
    "  fix: give each symbol one size and each array its dtype, or loosen the "
    'annotation: "_" is any size, ... any number of dims\n'
    "  docs: https://tessera-spmd.github.io/tessera/errors/T315.html"
)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def refusal(function, *args, **kwargs):
    with pytest.raises(AnnotationError) as caught:
        bind(function, args, kwargs, name="f")
    return str(caught.value)


def attention(
    x: ts.Tensor["B", "S", "D", ts.bf16],
    w_qkv: ts.Tensor["D", "3*D_head*H", ts.bf16],
    w_out: ts.Tensor["D_head*H", "D", ts.bf16],
    num_heads: int,
    bias: ts.Tensor["D", ts.bf16] = None,
) -> ts.Tensor["B", "S", "D", ts.bf16]: ...


def narrow(*shape):
    return array(*shape, dtype=jnp.bfloat16)


# --- what fits, and what is said of what does not


def test_arrays_that_agree_fit():
    good = (narrow(2, 4, 8), narrow(8, 48), narrow(16, 8), 4)
    assert bind(attention, good, {}, name="f").dim_names == {
        "x": ("B", "S", "D"),
        "w_qkv": ("D", "3*D_head*H"),
        "w_out": ("D_head*H", "D"),
    }
    bind(attention, good, {"bias": narrow(8)}, name="f")
    bind(attention, good, {"bias": None}, name="f")


def test_a_refusal_lists_every_array_and_every_conflict():
    message = refusal(
        attention, narrow(2, 4, 8), array(7, 48), w_out=narrow(15, 8), num_heads=4
    )
    assert message == (
        "[T315] the arguments of 'f' do not fit their annotations\n"
        '  got: x      bf16[2, 4, 8]  Tensor["B", "S", "D", bf16]\n'
        '  got: w_qkv  f32[7, 48]     Tensor["D", "3*D_head*H", bf16]\n'
        '  got: w_out  bf16[15, 8]    Tensor["D_head*H", "D", bf16]\n'
        "  got: w_qkv is f32, not bf16\n"
        "  got: D is 8 by x (dim 2) and w_out (dim 1), 7 by w_qkv (dim 0)\n"
        "  got: D_head*H is 16 by w_qkv (dim 1), 15 by w_out (dim 0)\n" + FIX
    )


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (array(8), "x has 1 dim, not 2"),
        (array(8, 3), "x (dim 1) is 3, not 4"),
        (array(8, 4, dtype=jnp.int32), "x is i32, not f32"),
        (
            2.5,
            "x is not an array, but the Python number 2.5, which is part of the "
            "program",
        ),
        (None, "x is not an array, but None"),
        ([array(8, 4)], "x is not an array, but of type list"),
        (jax.eval_shape(lambda: jax.random.key(0)), "x is key<fry>, not f32"),
    ],
    ids=str,
)
def test_one_array_that_does_not_fit_says_why(value, problem):
    def f(x: ts.Tensor["B", 4, ts.f32]): ...

    assert problem in refusal(f, value)


def test_any_number_of_dims_may_come_before_others():
    def f(
        x: ts.Tensor[..., "D"], y: ts.Tensor["*batch", "D"], z: ts.Tensor["*batch"]
    ): ...

    bind(f, (array(8), array(2, 3, 8), array(2, 3)), {}, name="f")
    bind(f, (array(5, 8), array(8), array()), {}, name="f")
    wrong = refusal(f, array(8), array(2, 3, 8), array(2, 4))
    assert "*batch is (2, 3) by y, (2, 4) by z" in wrong
    assert "x has 0 dims, not 1 or more" in refusal(f, array(), array(8), array())


def test_every_kind_of_array_is_checked():
    def f(x: ts.Tensor["B", ts.f32], y: ts.Tensor["B", ts.f32]): ...

    for one in (jnp.ones(3), np.ones(3, "f"), ts.dist.tensor((3,))):
        bind(f, (one, array(3)), {}, name="f")
        assert "B is 3 by x (dim 0), 4 by y (dim 0)" in refusal(f, one, array(4))


def test_what_is_not_annotated_as_an_array_is_left_alone():
    def f(a: callable, b: Any, c: Dict[str, Any], d: int, e: "no such thing", g=1): ...

    assert bind(f, (1, 2, 3, "4", 5, 6), {}, name="f").arguments == ()


def test_more_arguments_by_position_and_keyword_are_checked_each():
    def f(*xs: ts.Tensor["B"], **ys: ts.Tensor["B"]): ...

    bind(f, (array(3), array(3)), {"y": array(3)}, name="f")
    wrong = refusal(f, array(3), array(4), y=array(5))
    assert "B is 3 by args[0] (dim 0), 4 by args[1] (dim 0), 5 by y (dim 0)" in wrong


# --- a tensor without brackets


def test_without_brackets_it_is_any_array_or_tree_of_arrays():
    def f(x: ts.Tensor, state: Dict[str, ts.Tensor]): ...

    bind(f, (array(3), {"m": {"w": array(2)}, "step": 3, "none": None}), {}, name="f")
    assert "x is not an array, but of type str" in refusal(f, "x", {})
    assert "state/w is not an array, but of type str" in refusal(
        f, array(3), {"w": "x"}
    )


# --- containers


class Pair(NamedTuple):
    left: ts.Tensor["B"]
    right: ts.Tensor["B"]


@jax.tree_util.register_dataclass
@dataclass
class State:
    mean: ts.Tensor["B"]
    step: int


class Batch(TypedDict):
    inputs: ts.Tensor["B"]
    labels: "ts.Tensor['B']"


@pytest.mark.parametrize(
    ("hint", "value", "path"),
    [
        (Dict[str, ts.Tensor["B"]], {"w": array(3)}, "y/w"),
        (dict[str, "ts.Tensor['B']"], {"w": array(3)}, "y/w"),
        (Mapping[str, ts.Tensor["B"]], {"w": array(3)}, "y/w"),
        (Dict[str, Dict[str, ts.Tensor["B"]]], {"w": {"v": array(3)}}, "y/w/v"),
        (List[ts.Tensor["B"]], [array(3)], "y/0"),
        (list[Dict[str, ts.Tensor["B"]]], [{}, {"w": array(3)}], "y/1/w"),
        (Sequence[ts.Tensor["B"]], (array(3),), "y/0"),
        (Tuple[int, ts.Tensor["B"]], (1, array(3)), "y/1"),
        (tuple[ts.Tensor["B"], ...], (array(4), array(3)), "y/1"),
        (Optional[Dict[str, ts.Tensor["B"]]], {"w": array(3)}, "y/w"),
        (ts.Tensor["B"] | float, array(3), "y"),
        (ts.Tensor["B"] | dict[str, ts.Tensor["B"]], {"w": array(3)}, "y/w"),
        (ts.Tensor["A", "B"] | ts.Tensor["B"], array(3), "y"),
        (Pair, Pair(array(4), array(3)), "y/right"),
        (State, State(array(3), 1), "y/mean"),
        (Batch, {"inputs": array(4), "labels": array(3)}, "y/labels"),
        (jaxtyping.Float[jax.Array, "B"], array(3), "y"),
    ],
    ids=str,
)
def test_arrays_in_containers_are_checked(hint, value, path):
    def f(x, y): ...

    f.__annotations__ = {"x": ts.Tensor["B"], "y": hint}
    assert "B is 4 by x (dim 0)" in (message := refusal(f, array(4), value))
    assert f"3 by {path} (dim 0)" in message
    equal = bind(f, (array(4), jax.tree.map(lambda _: array(4), value)), {}, name="f")
    assert equal.dim_names[path] == ("B",)


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (Optional[ts.Tensor["B"]], None),
        (ts.Tensor["B"] | float, 2.0),
        (ts.Tensor["B"] | str | dict, {"a": 1}),
        (Optional[Dict[str, ts.Tensor["B"]]], None),
        (Dict[str, ts.Tensor["B"]], [array(3)]),
    ],
    ids=str,
)
def test_what_a_union_or_a_container_of_another_kind_says_nothing_of(hint, value):
    def f(y): ...

    f.__annotations__ = {"y": hint}
    assert bind(f, (value,), {}, name="f").arguments == ()


# --- results


def test_a_result_has_the_sizes_of_the_arguments():
    def f(
        x: ts.Tensor["B", "D"],
    ) -> tuple[ts.Tensor[ts.f32], dict[str, ts.Tensor["D"]]]: ...

    binding = bind(f, (array(2, 3),), {}, name="f")
    binding.check_result((array(), {"w": array(3)}))
    with pytest.raises(AnnotationError) as caught:
        binding.check_result((array(dtype=jnp.int32), {"w": array(4)}))
    assert str(caught.value) == (
        "[T315] the result of 'f' does not fit its annotation\n"
        '  got: x           f32[2, 3]  Tensor["B", "D"]\n'
        "  got: result/0    i32[]      Tensor[f32]\n"
        '  got: result/1/w  f32[4]     Tensor["D"]\n'
        "  got: result/0 is i32, not f32\n"
        "  got: D is 3 by x (dim 1), 4 by result/1/w (dim 0)\n" + FIX
    )


# --- where Tessera checks


def scaled(x: ts.Tensor["B", "D"], w: ts.Tensor["D"]) -> ts.Tensor["B", "D"]:
    return x * w


X, W, SHORT = np.ones((2, 3), "f"), np.ones(3, "f"), np.ones(1, "f")
CONFLICT = "D is 3 by x \\(dim 1\\), 1 by w \\(dim 0\\)"


@pytest.mark.parametrize(
    "make",
    [
        ts.function,
        ts.jit,
        ts.graph.stage("part"),
        ts.graph.training_step,
        lambda body: ts.function(lambda x, w: ts.function(body)(x, w)),
        lambda body: ts.function(lambda x, w: ts.graph.stage("part")(body)(x, w)),
        lambda body: jax.jit(ts.function(body)),
        lambda body: lambda x, w: ts.function(body).trace(x, w),
    ],
    ids=["function", "jit", "stage", "step", "inner", "inner stage", "in jit", "trace"],
)
def test_a_function_is_checked_when_it_is_traced(make):
    step = make(scaled)
    step(X, W)
    with pytest.raises(AnnotationError, match=CONFLICT):
        step(X, SHORT)


def test_an_inner_function_with_layouts_is_checked(dp_mesh):
    inner = ts.function(scaled, mesh=dp_mesh, out_specs=ts.ShardSpec.replicated())
    step = ts.function(lambda x, w: inner(x, w))
    with pytest.raises(AnnotationError, match=CONFLICT):
        step.trace(X, SHORT)


def test_a_result_is_checked_when_it_is_traced():
    def summed(x: ts.Tensor["B", "D"]) -> ts.Tensor["B"]:
        return x.sum(0)

    for step in (ts.function(summed), ts.function(lambda x: ts.function(summed)(x))):
        with pytest.raises(
            AnnotationError, match=r"B is 2 by x \(dim 0\), 3 by result"
        ):
            step(X)


def test_a_number_of_python_is_a_result_of_its_dtype():
    def number(x: ts.Tensor["B", "D"]) -> tuple[ts.Tensor[ts.f32], ts.Tensor[ts.i32]]:
        return 0.5, 3

    half, three = ts.function(number)(X)
    assert (half.item(), three.item()) == (0.5, 3)


def test_a_repeated_call_looks_at_no_annotation(monkeypatch):
    step = ts.function(scaled)
    step(X, W)
    monkeypatch.setattr("tessera.graph.tracer.arguments.bind", None)
    step(X + 1, W)
    with pytest.raises(TypeError):
        step(X[:1], W)


# --- names of dims in layouts


def test_layouts_name_dims_as_annotations_do(dp_mesh):
    spec = ts.ShardSpec(partition=("B",), mesh_axes=("dp",))

    @ts.function(
        mesh=dp_mesh, in_specs={"x": spec, "rest": spec}, out_specs=(spec, None)
    )
    def step(
        x: ts.Tensor["S", "B"], rest: dict[str, ts.Tensor["B", "D"]]
    ) -> tuple[ts.Tensor["S", "B"], ts.Tensor]:
        return x, rest["w"].sum()

    graph = step.trace(array(3, 8), {"w": array(8, 2)}).graph
    assert [tuple(value.spec) for value in graph.inputs] == [(None, "dp"), ("dp",)]
    assert tuple(graph.outputs[0].spec) == (None, "dp")


def test_an_expression_is_the_name_of_its_dim(dp_mesh):
    spec = ts.ShardSpec(("3*H",), ("dp",))

    @ts.function(mesh=dp_mesh, in_specs={"w": spec})
    def step(w: ts.Tensor["D", "3*H"]):
        return w

    (value,) = step.trace(array(2, 24)).graph.inputs
    assert tuple(value.spec) == (None, "dp")


def test_a_name_that_no_dim_has_comes_with_those_there_are(dp_mesh):
    @ts.function(mesh=dp_mesh, in_specs={"x": ts.ShardSpec(("C",), ("dp",))})
    def step(x: ts.Tensor["B", "D"]):
        return x

    with pytest.raises(DimError, match="Known: 'B', 'D', 'row', 'col'"):
        step(X)


def test_an_inner_function_names_dims_too(dp_mesh):
    spec = ts.ShardSpec(("B",), ("dp",))

    def inner(x: ts.Tensor["D", "B"]) -> ts.Tensor["D", "B"]:
        return x + 1

    inner = ts.function(inner, mesh=dp_mesh, in_specs={"x": spec}, out_specs=spec)
    step = ts.function(lambda x: inner(x))
    result = step(np.ones((3, 8), "f"))
    assert tuple(result.sharding.spec) == (None, "dp")


def test_a_step_with_a_pipeline_may_say_how_many_rows_there_are():
    mesh = ts.Mesh(["pp"], devices=range(2))
    stages = [ts.graph.stage(name)(lambda x: x * 2) for name in ("first", "second")]

    @ts.graph.pipeline(stages=stages, mesh=mesh, microbatches=2)
    def model(x):
        return stages[1](stages[0](x))

    for options in ({}, {"mesh": mesh, "out_specs": ts.ShardSpec.replicated()}):

        @ts.function(**options)
        def loss_of(x: ts.Tensor[8, "D"]) -> ts.Tensor[8, "D"]:
            return model(x)

        step = ts.graph.training_step(lambda x: jnp.mean(loss_of(x)), mesh=mesh)
        assert step.trace(array(8, 3)).graph.microbatch is None
        with pytest.raises(AnnotationError, match=r"x \(dim 0\) is 16, not 8"):
            step.trace(array(16, 3))


def test_a_pipeline_and_its_stages_are_checked():
    spec = ts.Tensor["B", "D"]

    def stage(name, hint):
        def body(x):
            return x * 2

        body.__annotations__ = {"x": hint, "return": spec}
        return ts.graph.stage(name)(body)

    def traced(hint, result):
        stages = [stage("first", spec), stage("second", hint)]

        def body(x):
            return stages[1](stages[0](x))

        body.__annotations__ = {"x": spec, "return": result}
        mesh = ts.Mesh(["pp"], devices=range(2))
        model = ts.graph.pipeline(stages=stages, mesh=mesh, microbatches=2)(body)
        step = ts.graph.training_step(lambda x: jnp.mean(model(x)))
        return step.trace(array(8, 3))

    traced(spec, spec)
    with pytest.raises(AnnotationError, match="arguments of 'second'"):
        traced(ts.Tensor["B", "D", "E"], spec)
    with pytest.raises(AnnotationError, match="result of 'body'"):
        traced(spec, ts.Tensor["D", "B"])
