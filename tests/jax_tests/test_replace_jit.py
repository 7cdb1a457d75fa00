# SPDX-License-Identifier: Apache-2.0
"""The plugin of ``make test-jax``, on made-up files in the form of JAX's own."""

import json
import os
from pathlib import Path

import jax
import pytest

from tests.jax_tests.differences import NOT_REVIEWED, Group, Table, news
from tests.jax_tests.outcomes import Outcome

HERE = Path(__file__).parent
TESTS = """
import unittest
import jax, jax.numpy as jnp
from jax import jit

class MadeUpTest(unittest.TestCase):
    def test_twice(self): self.assertEqual(jit(lambda x: 2 * x)(jnp.ones(())), 2)
    def test_plain(self): self.assertEqual(jnp.cos(0.0), 1)
    def test_kind(self): self.assertIn("Pjit", type(jax.jit(jnp.cos)).__name__)
    def test_jaxpr(self):
        def read(jaxpr): return jaxpr.eqns[0].params["no such parameter"]
        read(jax.make_jaxpr(jit(jnp.sin))(1.0))
    def test_body(self): jit(lambda x: {}["no such key"])(jnp.ones(()))
    def test_error(self):
        with self.assertRaises(KeyError): jax.jit(lambda: 1)(2)
"""


@pytest.mark.slow(reason="it runs pytest, which imports the helpers of JAX's tests")
def test_what_a_test_calls_as_jax_jit_is_tesseras_and_every_outcome_is_recorded(
    tmp_path, capsys
):
    (tmp_path / "made_up_test.py").write_text(TESTS)
    command = ["-c", os.devnull, "--rootdir", tmp_path, "-p", "no:cacheprovider"]
    command += ["-p", "tests.jax_tests.replace_jit", tmp_path / "made_up_test.py"]
    real = jax.jit
    pytest.main([*map(str, command), "--record", str(tmp_path / "record")])
    assert jax.jit is real
    assert "4 failed, 2 passed" in capsys.readouterr().out
    lines = map(json.loads, (tmp_path / "record").read_text().splitlines())
    records = {line["test"].rpartition("::")[2]: line for line in lines}
    kinds = {name: (line["kind"], line["reached"]) for name, line in records.items()}
    assert kinds == {
        "test_twice": ("passed", True),
        "test_plain": ("passed", False),
        "test_kind": ("assertion", True),
        "test_jaxpr": ("reading", True),
        "test_body": ("crash", True),
        "test_error": ("message", True),
    }
    assert "the test expects KeyError" in records["test_error"]["why"]


@pytest.mark.parametrize("replaced", ["jit", "grad"])
def test_every_entry_of_the_tables_has_a_reason_in_words(replaced):
    table = Table.read(HERE / f"differences-{replaced}.toml")
    assert not [g for g in table.groups if g.reason.startswith(NOT_REVIEWED)]
    assert len(table.kinds) == sum(len(group.tests) for group in table.groups)


def test_a_run_is_compared_with_the_table_and_mends_it(tmp_path):
    listed = [Group("crash", "no such key", ("a::b::old", "a::b::same", "a::b::other"))]
    table = Table("0.10.2", ("a",), groups=tuple(listed))
    outcomes = {
        "a::b::new": Outcome("value", True, "AssertionError: 1 != 2"),
        "a::b::old": Outcome("passed", True),
        "a::b::other": Outcome("value", True, "AssertionError: 1 != 2"),
        "a::b::same": Outcome("crash", True, "KeyError: 'a'"),
        "a::b::skipped": Outcome("skipped", False),
    }
    assert news(table, outcomes) == [
        "a::b::new: not listed: value: AssertionError: 1 != 2",
        "a::b::old: listed as crash, and passed",
        "a::b::other: listed as crash, is value: AssertionError: 1 != 2",
    ]
    mended = table.updated(outcomes)
    mended.write(tmp_path / "table.toml")
    assert Table.read(tmp_path / "table.toml") == mended
    assert not news(mended, outcomes)
    assert mended.groups == (
        Group("crash", "no such key", ("a::b::same",)),
        Group(
            "value",
            f"{NOT_REVIEWED}AssertionError: 1 != 2",
            ("a::b::new", "a::b::other"),
        ),
    )
