# SPDX-License-Identifier: Apache-2.0
"""Programs that JAX's persistent cache has: they are those of the same source lines."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import PartitionSpec as P

from tessera.graph.jit import function
from tessera.mesh import Mesh

WITH_LINES = "JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY"
SOURCE = "def step(x, w):\n    return x @ w\n"
SOURCES = (SOURCE, f"# A comment.\n{SOURCE}", SOURCE)


@pytest.fixture
def cache(tmp_path):
    """A folder that the user gives JAX."""
    name = "jax_compilation_cache_dir"
    before = jax.config.values[name]
    jax.config.update(name, str(tmp_path / "compiled"))
    compilation_cache.reset_cache()
    yield tmp_path / "compiled"
    jax.config.update(name, before)
    compilation_cache.reset_cache()


def line_of_the_sum(file, source):
    """Where the ledger says that the all-reduce of a program comes from."""
    file.write_text(source)
    names = {}
    exec(compile(source, file, "exec"), names)
    step = function(
        names["step"],
        mesh=Mesh(["tp"], devices=range(2)),
        in_specs={"x": P(None, "tp"), "w": P("tp")},
        out_specs=P(),
    )
    (row,) = step.compile(jnp.ones((2, 4)), jnp.ones((4, 2))).collectives.rows
    return row.source.removeprefix(f"{file}:")


def test_a_cached_program_shows_no_lines_of_an_older_source(
    cache, tmp_path, monkeypatch
):
    monkeypatch.delenv(WITH_LINES, raising=False)
    lines, programs = [], []
    for source in SOURCES:
        lines.append(line_of_the_sum(tmp_path / "own.py", source))
        programs.append({*cache.iterdir()})
    assert lines == ["2", "3", "2"]
    assert programs[0] < programs[1] == programs[2]  # the first was found again


def test_the_environment_may_ask_for_programs_of_moved_lines(
    cache, tmp_path, monkeypatch
):
    monkeypatch.setenv(WITH_LINES, "0")
    lines = [line_of_the_sum(tmp_path / "own.py", source) for source in SOURCES]
    assert lines == ["2", "2", "2"]
