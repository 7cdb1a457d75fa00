# SPDX-License-Identifier: Apache-2.0
"""Machines are files in which every figure has a source."""

import json
import tomllib

import pytest

from tessera.errors import TargetError
from tessera.foundations.config_files import configs_dir
from tessera.targets.machine import machine, machine_names, machine_of_kind

NAMED = ("a100", "h100", "h200", "b200", "gb200")
NAMED += ("v4", "v5e", "v5p", "v6e", "7x", "cpu")
SHARES = ("matmul", "attention", "memory", "overlap")


def as_toml(value):
    """A value on one line of a TOML file."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k} = {as_toml(v)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(as_toml, value))}]"
    return json.dumps(value)


def file_of(folder, **changes):
    """A copy of the file of an H100 with some keys replaced; None removes one."""
    values = tomllib.loads((configs_dir() / "target" / "h100.toml").read_text())
    values.update(changes)
    path = folder / "mine.toml"
    kept = {key: value for key, value in values.items() if value is not None}
    path.write_text("".join(f"{key} = {as_toml(v)}\n" for key, v in kept.items()))
    return str(path)


def test_the_named_machines_have_files():
    assert set(NAMED) <= set(machine_names())


@pytest.mark.parametrize("name", machine_names())
def test_every_file_describes_a_machine(name):
    found = machine(name)
    assert found.memory_bytes > 2**29
    assert found.links[0].bandwidth >= found.links[-1].bandwidth
    assert all(found.sources.values())
    assert bool(found.compiler_config) == (found.compiler == "cuda")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
    ],
)
def test_a_machine_is_found_by_the_kind_of_its_devices(kind, name):
    assert machine_of_kind(kind).name == name


def test_a_cpu_has_no_machine_of_its_kind():
    assert machine_of_kind("cpu") is None


def test_only_machines_with_a_rate_for_it_multiply_8_bits(tmp_path):
    rates = {"bfloat16": 2.0, "float32": 1.0, "elementwise": 1.0}
    narrow = machine(file_of(tmp_path, flops={**rates, "float8": 4.0}))
    assert (narrow.has_fp8, narrow.peak("float8")) == (True, 4.0)
    (tmp_path / "other").mkdir()
    wide = machine(file_of(tmp_path / "other", flops=rates))
    assert (wide.has_fp8, wide.peak("float8")) == (False, None)
    known = {name for name in machine_names() if machine(name).has_fp8}
    blackwell = {"b200", "gb200"}
    assert known == {"7x", "cpu", "h100", "h200", *blackwell}


def test_a_file_of_ones_own_is_a_machine(tmp_path):
    mine = machine(file_of(tmp_path, memory_bytes=10**10))
    assert (mine.name, mine.memory_bytes) == ("mine", 10**10)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"memory_bytes": None}, "the key 'memory_bytes' is missing"),
        ({"memory_byte": 1}, "unknown key 'memory_byte': did you mean 'memory_bytes'"),
        ({"memory_bytes": -1}, "memory_bytes is a number above 0"),
        ({"memory_bytes": "1e5x"}, "memory_bytes is a number above 0"),
        ({"compiler": "nvcc"}, "compiler is one of cpu, cuda, tpu"),
        ({"flops": {"bf16": 1e15}}, "flops has the keys bfloat16, float32"),
        (
            {"efficiency": dict.fromkeys([*SHARES, "float8"], 0.5)},
            "efficiency has the keys",
        ),
        (
            {"efficiency": {"matmul": 2, "attention": 1, "memory": 1, "overlap": 1}},
            "efficiency has shares of 1",
        ),
        ({"links": []}, "links is a list of levels"),
        ({"links": [{"name": "a", "bandwidth": 1}]}, "links[0] has the keys"),
        ({"sources": {}}, "sources.memory_bytes is missing"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(tmp_path, changes, complaint):
    with pytest.raises(TargetError) as error:
        machine(file_of(tmp_path, **changes))
    assert complaint in str(error.value)


def test_a_file_that_is_missing_torn_or_huge_is_refused(tmp_path):
    with pytest.raises(TargetError, match="FileNotFoundError"):
        machine(str(tmp_path / "none.toml"))
    for name, text, complaint in (
        ("empty", "", "the key 'compiler' is missing"),
        ("torn", "a = [1", "TOMLDecodeError"),
        ("deep", f"a = {'[' * 10_000}", "RecursionError"),
        ("huge", "#" * (2**20 + 1), "1,048,577 characters"),
    ):
        (tmp_path / f"{name}.toml").write_text(text)
        with pytest.raises(TargetError, match=complaint):
            machine(str(tmp_path / f"{name}.toml"))
