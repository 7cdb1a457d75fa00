# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: T201, UP031, UP032 - printing, and ways to format, are what is tested
"""``print`` in a traced function prints when the program runs."""

import dataclasses
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import pytest

import tessera as ts
from tessera.errors import ControlFlowError

X = jnp.arange(2.0)


def printed(capsys) -> list[str]:
    jax.effects_barrier()
    return capsys.readouterr().out.splitlines()


def test_every_call_prints_the_values_of_that_call(capsys):
    @ts.function
    def function(x):
        print("x is", x, sep=" -> ", end=".\n")
        return x

    for x in (X, X + 1):
        function(x)
    assert printed(capsys) == ["x is -> [0. 1.].", "x is -> [1. 2.]."]
    assert function.num_programs() == 1


def test_text_without_traced_values_is_printed_by_every_call(capsys):
    @ts.function
    def function(x, name):
        print(f"step {name!r}")
        print()
        return x

    for _ in range(2):
        function(X, "a")
    assert printed(capsys) == ["step 'a'", "", "step 'a'", ""]


def test_a_branch_prints_only_if_it_is_taken(capsys):
    @ts.function
    def function(x, limit):
        if x > limit:
            x = x * 0.5
            print(f"too large: {x * 2}, now {x}")
        else:
            print("fine")
        return x

    function(jnp.float32(3), jnp.float32(1))
    assert printed(capsys) == ["too large: 3.0, now 1.5"]
    function(jnp.float32(0), jnp.float32(1))
    assert printed(capsys) == ["fine"]


def test_a_loop_prints_in_every_turn(capsys):
    @ts.function
    def function(n):
        total = 0
        for i in range(4):
            if i >= n:
                break
            total += i
            print("turn", i)
        return total

    function(jnp.int32(3))
    assert sorted(printed(capsys)) == ["turn 0", "turn 1", "turn 2"]


def test_formats_and_conversions(capsys):
    @ts.function
    def function(x, n):
        width = 8
        print(f"{x[1]:{width}.3f}|{n:>4}|{x!r:s}", n)
        print(f"{n=}", f"{x[0].astype(jnp.bfloat16):.2f}")
        return x

    function(X, jnp.int32(7))
    text = "   1.000|   7|array([0., 1.], dtype=float32)"
    assert printed(capsys) == [f"{text} 7", "n=7 0.00"]


def test_another_function_that_is_called_print_gets_text(capsys):
    @ts.function
    def function(x, name):
        print(x[1])
        log(name)
        return x

    def log(name):
        print = sorted  # noqa: A001 - what is tested
        lines = print(f"{name}a{1:02d}")
        assert lines == ["0", "1", "a", "b"]

    function(X, "b")
    assert printed(capsys) == ["1.0"]


def text_of(x):
    return f"value {x}"


def local_print(x):
    print = str  # noqa: A001 - what is tested
    return {print(f"{x}"): x}


USES = {
    "a result": text_of,
    "an entry of the result": lambda x: {"text": f"{x}", "x": x},
    "a key": lambda x: {f"{x}": x},
    "a comparison": lambda x: x if text_of(x) == "value 1.0" else -x,
    "a slice": lambda x: x if text_of(x)[0] == "v" else -x,
    "a method": lambda x: x * len(text_of(x).upper()),
    "a length": lambda x: x * len(str(x)),
    "str.format": lambda x: print("{}".format(x)),
    "str.join": lambda x: print(", ".join(str(v) for v in [x])),
    "a text in a container": lambda x: print([f"{x}"]),
    "str in a print": lambda x: print("x: " + str(x)),
    "a text that is printed later": lambda x: print(text_of(x)),
    "the percent operator": lambda x: print("%s" % x),
    "another function that is called print": lambda x: local_print(x),
}


@pytest.mark.parametrize("function", USES.values(), ids=USES)
def test_text_that_is_only_known_when_the_program_runs_is_not_used_before(function):
    with pytest.raises(ControlFlowError, match="Python needs a value at") as caught:
        ts.function(function)(jnp.float32(1))
    assert "use print(x), with an f-string as its argument" in caught.value.fix


def test_prints_are_found_wherever_they_are(capsys):
    table = {"log": print}

    @ts.function
    def function(x):
        table["log"]("x", x[1])
        return x

    function(X)
    assert printed(capsys)[-1] == "x 1.0"


def test_text_that_is_written_into_an_argument_is_refused():
    @ts.function
    def function(state, x):
        state["text"] = f"{x}"
        return x

    state = {}
    with pytest.raises(ControlFlowError, match="Python needs a value at"):
        function(state, jnp.float32(1))
    assert state == {}


def test_trees_of_arrays(capsys):
    @ts.function
    def function(x):
        print({"loss": x[1], "rows": [x, None]}, (x[0], "a"))
        return x

    function(X)
    assert printed(capsys) == [
        "{'loss': 1.0, 'rows': [array([0., 1.], dtype=float32), None]} (0.0, 'a')"
    ]


def test_a_helper_may_print(capsys):
    def log(value):
        print("value", value)

    class Model:
        def __call__(self, x):
            log(x[1])
            return x

    @ts.function
    def function(x, model):
        return model(x)

    function(X, Model())
    assert printed(capsys) == ["value 1.0"]


def test_a_function_that_is_called_may_print(capsys):
    @ts.function
    def inner(x):
        print(f"inner {x[1]:.1f}")
        return x

    @ts.function
    def outer(x):
        return inner(x) * 2.0

    outer(X)
    assert printed(capsys) == ["inner 1.0"]


def test_a_gradient_prints_once(capsys):
    @ts.function
    def function(w):
        loss = jnp.sum(w**2)
        if loss > 0:
            print("loss", loss)
            loss = loss * 2.0
        return ts.grad(loss, w)

    function(X)
    assert printed(capsys) == ["loss 1.0"]


def test_arrays_on_a_mesh_are_printed_whole_and_once(capsys, dp_mesh):
    @ts.function(mesh=dp_mesh, in_specs={"x": ts.ShardSpec((0,), ("dp",))})
    def function(x):
        print(x)
        return x

    function(jnp.arange(8))
    assert printed(capsys) == ["[0 1 2 3 4 5 6 7]"]


def test_another_file(capsys):
    @ts.function
    def function(x):
        print("lost", x[1], file=sys.stderr)
        return x

    function(X)
    jax.effects_barrier()
    assert capsys.readouterr().err == "lost 1.0\n"


def test_code_that_a_program_calls_back_prints_by_itself(capsys):
    def host(x):
        print("host", x.shape)
        return x

    @ts.function
    def function(x):
        print("device")
        return jax.pure_callback(host, jax.ShapeDtypeStruct((2,), jnp.float32), x)

    jax.block_until_ready(function(X))
    assert sorted(printed(capsys)) == ["device", "host (2,)"]


def test_text_from_traced_values_is_text_like_any_other():
    @ts.function
    def function(x):
        print("begin")
        name = f"key {x.shape[0]}"
        table = {"key 2": x, str(x.dtype): 2.0}
        return table[name] * table["float32"]

    assert function(X)[1] == 2


@pytest.mark.filterwarnings("error")
def test_modules_are_not_asked_for_attributes_that_have_other_names():
    module = types.ModuleType("warns")
    module.__getattr__ = lambda name: warnings.warn(name, stacklevel=2)
    box = types.SimpleNamespace(value=2)

    @ts.function
    def function(x):
        return x * box.value if module else x

    assert float(function(jnp.float32(1))) == 2


@dataclasses.dataclass
class Point:
    x: jax.Array


def test_the_text_of_a_dataclass_is_that_of_whoever_asks():
    # JAX asks for the text of its own, such as the pullback that jacrev maps.
    cubes = ts.jit(jax.jacrev(lambda x: x**3))
    assert cubes(jnp.float32(2.0)) == 12.0

    @ts.jit
    def named(x):
        return {str(Point(x)): x}

    with pytest.raises(ControlFlowError, match=r"test_printing\.py") as caught:
        named(jnp.float32(1.0))
    assert caught.value.code == "T319"
