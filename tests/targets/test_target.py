# SPDX-License-Identifier: Apache-2.0
"""A target is a machine of some size; its compiler may be missing."""

import pytest

from tessera.errors import TargetCompilerError, TargetError
from tessera.mesh import Mesh
from tessera.targets import target as target_module
from tessera.targets.target import Target


@pytest.mark.parametrize(
    ("text", "shape", "devices", "platform"),
    [
        ("h100:2x8", (2, 8), 16, "gpu"),
        ("h100:4", (1, 4), 4, "gpu"),
        ("gb200:18x4", (18, 4), 72, "gpu"),
        ("gb200:18x4*8", (18, 4), 576, "gpu"),
        ("h100:8*4", (1, 8), 32, "gpu"),
        ("v5e:4x4*2", (4, 4), 32, "tpu"),
        ("v5p:4x4x4*2", (4, 4, 4), 128, "tpu"),
        ("v5p:4x4x4*1", (4, 4, 4), 64, "tpu"),
        ("v5p:4x4x4", (4, 4, 4), 64, "tpu"),
        ("v5e:16x16", (16, 16), 256, "tpu"),
        ("7x:2x2x1", (2, 2, 1), 8, "tpu"),
        ("cpu:8", (8,), 8, "cpu"),
    ],
)
def test_a_text_names_a_machine_and_its_size(text, shape, devices, platform):
    target = Target.parse(text)
    assert (target.shape, target.num_devices, target.platform) == (
        shape,
        devices,
        platform,
    )
    assert Target.parse(target.name) == target
    assert len(target.coordinates) == devices


@pytest.mark.parametrize(
    ("text", "suggestion"),
    [
        ("h10:2x8", "did you mean 'h100'"),
        ("h100", "such as h100:2x8"),
        ("8xh100", "such as h100:8"),
        ("16*h100", "such as h100:2x8"),
        ("h100x8", "such as h100:8"),
        ("v5e-16", "such as v5e:4x4"),
        ("h100:2x16", "such as h100:4x8"),
        ("h100:0x8", "such as h100:2x8"),
        ("h100:2x8x2", "such as h100:2x8"),
        ("h100:two", "such as h100:2x8"),
        ("v5e:4x4x4", "such as v5e:4x4"),
        ("v5e:3x4", "such as v5e:4x4"),
        ("v5p:40x4x4", "such as v5p:16x20x28"),
        ("cpu:2x4", "such as cpu:2048"),
        ("cpu:8*2", "such as cpu:8"),
        ("v5e:2*4x4", "or v5e:4x4*2 for two slices"),
        ("v5e:4x4*0", "such as v5e:4x4"),
        ("v5e:32x4*2", "such as v5e:16x16"),
        ("h100:4x8*2", "such as h100:8x8"),
        ("gb200:20x4*2", "80 devices in each, and NVLink joins 72 of them"),
        ("", "Known: "),
    ],
)
def test_a_size_that_does_not_exist_is_refused_with_one_that_does(text, suggestion):
    with pytest.raises(TargetError) as error:
        Target.parse(text)
    assert suggestion in str(error.value)


def test_a_compiler_of_another_machine_is_refused():
    with pytest.raises(TargetError, match="no compiler 'tpu'"):
        Target.parse("h100:8", compiler="tpu")


def test_a_missing_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setattr(target_module, "find_spec", lambda name: None)
    mesh = Mesh(["fsdp"], shape=(8,), target="h100:1x8")
    with pytest.raises(TargetCompilerError) as error:
        _ = mesh.compile_mesh
    assert "'tessera-spmd[targets-cuda13]' or 'tessera-spmd[targets-cuda12]'" in str(
        error.value
    )
    assert "runtime.target_compiler=cpu" in str(error.value)


@pytest.mark.parametrize(
    ("installed", "missing"),
    [
        ({"jax_plugins.xla_cuda12", "nvidia.cuda_nvcc"}, []),
        ({"jax_plugins.xla_cuda13", "nvidia.cu13"}, []),
        ({"jax_plugins.xla_cuda12"}, ["nvidia.cuda_nvcc"]),
        # Half of each is no compiler.
        ({"jax_plugins.xla_cuda12", "nvidia.cu13"}, ["jax_plugins.xla_cuda13"]),
    ],
)
def test_the_compiler_of_either_cuda_serves(installed, missing, monkeypatch):
    found = {name: name for name in installed}
    monkeypatch.setattr(target_module, "find_spec", found.get)
    assert Target.parse("h100:8")._missing_packages() == missing


def test_a_compiler_that_does_not_start_says_why(monkeypatch):
    def fails(self):
        raise RuntimeError("UNIMPLEMENTED: no such API\nmore")

    monkeypatch.setattr(target_module, "find_spec", lambda name: name)
    monkeypatch.setattr(Target, "_topology", fails)
    with pytest.raises(TargetCompilerError, match="UNIMPLEMENTED: no such API"):
        _ = Target.parse("v5e:2x4").devices


def test_the_cpu_stands_in_where_asked():
    target = Target.parse("h100:2x8", compiler="cpu")
    assert (target.is_stand_in, target.platform, len(target.devices)) == (
        True,
        "cpu",
        16,
    )
    assert target != Target.parse("h100:2x8")


def test_the_first_dim_of_a_torus_varies_fastest():
    assert Target.parse("v5e:2x4").coordinates[:3] == (
        (0, 0, 0),
        (1, 0, 0),
        (0, 1, 0),
    )
    assert Target.parse("7x:2x2x1").coordinates[1:3] == ((0, 0, 0, 0), (1, 0, 0, 0))


def test_the_slice_is_the_last_of_the_coordinates_and_varies_slowest():
    two = Target.parse("v5e:2x2*2").coordinates
    assert two[3:5] == ((1, 1, 0), (0, 0, 1))
    assert Target.parse("gb200:2x4*2").coordinates[7:9] == ((1, 3), (2, 0))
