# SPDX-License-Identifier: Apache-2.0
import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.analysis.budget import parse_bytes
from tessera.analysis.collective import Collective
from tessera.analysis.hlo import Shape
from tessera.analysis.ledger import Ledger
from tessera.errors import BudgetError, BudgetFormError


def row(kind, axes, size, *, calls=1, reason="sum", line=1):
    return Collective(
        kind=kind,
        axes=axes,
        group_size=2,
        arrays=(Shape("u8", (size,)),),
        calls=calls,
        conditional=False,
        op_name="f/dot",
        source=f"/a/b/m.py:{line}",
        reason=reason,
        dims=(1,),
    )


LEDGER = Ledger(
    (
        row("all-reduce", ("dp",), 3000, line=3),
        row("all-gather", ("tp",), 100, calls=12, reason="", line=4),
        row("all-reduce", ("dp", "tp"), 500, line=5),
    ),
    {"dp": 2, "tp": 4},
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (12, 12),
        ("12B", 12),
        ("1kB", 1000),
        ("40MB", 40_000_000),
        ("40 MB", 40_000_000),
        ("1.5GiB", 3 * 2**29),
        ("2KiB", 2048),
        ("1TB", 10**12),
    ],
)
def test_a_size_is_a_number_or_text_with_a_unit(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("size", ["40", "40 mb", "MB", "-1MB", -1, 1.5, True, None])
def test_anything_else_is_refused(size):
    with pytest.raises(BudgetFormError) as caught:
        parse_bytes(size, "the budget of tp")
    assert str(caught.value) == (
        "[T210] the budget of tp is not a number of bytes\n"
        f"  got: {size!r}\n"
        '  fix: use an integer of 0 or more, or text such as "40MB" or "1.5GiB"\n'
        "  docs: https://tessera-spmd.github.io/tessera/errors/T210.html"
    )


@given(st.integers(0, 2**60))
def test_whole_numbers_with_a_unit_are_exact(number):
    assert parse_bytes(f"{number}B") == number or number >= 2**53
    assert parse_bytes(number) == number


def test_what_keeps_to_its_budget_passes():
    LEDGER.assert_budget(dp=3500, tp="1.7kB", total="4.7kB", unplanned=1200)
    LEDGER.assert_budget({("dp", "tp"): 500, "tp": 1700}, calls={"tp": 13, "total": 14})
    LEDGER.assert_budget()


def test_the_budget_of_an_axis_is_of_all_that_runs_over_it():
    with pytest.raises(BudgetError, match=r"dp: 3\.42 KiB = 3,500 bytes, at most"):
        LEDGER.assert_budget(dp=3499)
    with pytest.raises(BudgetError, match="tp×dp: 500 B = 500 bytes, at most 499 B"):
        LEDGER.assert_budget({("tp", "dp"): 499})
    LEDGER.assert_budget({("dp",): 3000})


def test_everything_that_is_exceeded_is_listed_with_its_lines():
    with pytest.raises(BudgetError) as caught:
        LEDGER.assert_budget(dp="1kB", unplanned=0, calls={"tp": 10}, total="1MB")
    assert str(caught.value) == (
        "[T209] the program sends more than its budget allows\n"
        "  got: dp: 3.42 KiB = 3,500 bytes, at most 1000 B\n"
        "  got:   2.93 KiB all-reduce over dp at b/m.py:3\n"
        "  got:   500 B all-reduce over dp×tp at b/m.py:5\n"
        "  got: unplanned: 1.17 KiB = 1,200 bytes, at most 0 B\n"
        "  got:   1.17 KiB all-gather over tp at b/m.py:4, unplanned\n"
        "  got: tp: 13 calls, at most 10\n"
        "  got:   1.17 KiB all-gather over tp at b/m.py:4, unplanned\n"
        "  got:   500 B all-reduce over dp×tp at b/m.py:5\n"
        "  fix: at b/m.py:4 keep u8[100] split: "
        "jax.lax.with_sharding_constraint(x, "
        "NamedSharding(mesh.jax, P(P.UNCONSTRAINED, 'tp')))\n"
        "  fix: raise the budget, or declare other layouts at the lines above; "
        "print(ledger.as_text()) shows every collective\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T209.html"
    )


def test_the_fix_names_the_line_and_the_constraint():
    mesh = ts.Mesh(["tp"], devices=range(8))

    @ts.function(mesh=mesh, in_specs={"x": P(None, "tp")})
    def ranked(x):
        return x @ x.T @ jnp.cumsum(x, axis=1)

    x = jax.ShapeDtypeStruct((8, 64), "float32")
    with pytest.raises(BudgetError) as caught:
        ranked.compile(x).collectives.assert_budget(unplanned=0)
    keep = "NamedSharding(mesh.jax, P(P.UNCONSTRAINED, 'tp'))"
    line = ranked.body.__code__.co_firstlineno + 2
    assert re.search(
        rf"at \S*test_budget.py:{line} keep f32\[8,64\] split: .*{re.escape(keep)}",
        str(caught.value),
    )


def test_a_long_list_is_cut():
    rows = tuple(row("all-reduce", ("dp",), 10, line=n) for n in range(8))
    with pytest.raises(BudgetError, match="and 3 more"):
        Ledger(rows, {"dp": 8}).assert_budget(dp=0)


def test_an_axis_that_does_not_exist_is_no_budget():
    with pytest.raises(BudgetFormError) as caught:
        LEDGER.assert_budget(unplaned=0)
    assert str(caught.value) == (
        "[T210] a budget is for mesh axis 'unplaned', which the program does not have\n"
        "  got: axes ('dp', 'tp')\n"
        "  fix: did you mean 'unplanned'? Known: 'dp', 'tp', 'total', 'unplanned'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T210.html"
    )
