# SPDX-License-Identifier: Apache-2.0
"""The inner axes of a mesh are on the fast links of its target."""

import dataclasses
import itertools
import warnings

import pytest

from tessera.errors import AbstractMeshError, TargetError
from tessera.mesh import Mesh
from tessera.targets import device_layout
from tessera.targets.device_layout import device_grid
from tessera.targets.target import Target


def neighbors(target, ids):
    """Whether each device is one hop from the next."""
    places = [target.coordinates[i] for i in ids]
    hops = [
        sum(
            min(abs(a - b), size - abs(a - b))
            for a, b, size in zip(*pair, (*target.shape, 1), strict=True)
        )
        for pair in itertools.pairwise(places)
    ]
    return all(hop <= 1 for hop in hops)


def test_the_inner_axis_stays_inside_the_host():
    mesh = Mesh(["fsdp", "tp"], shape=(4, 4), target="h100:2x8")
    assert mesh.device_ids == tuple(range(16))
    rows = [mesh.device_ids[i : i + 4] for i in range(0, 16, 4)]
    assert all(len({device // 8 for device in row}) == 1 for row in rows)


@pytest.mark.parametrize("shape", [(4, 4), (16, 1), (1, 16), (2, 2, 4)])
def test_axes_of_a_torus_go_along_its_dims(shape):
    target = Target.parse("v5e:4x4")
    ids = device_grid(target, shape)
    assert sorted(ids) == list(range(16))
    inner = next((size for size in reversed(shape) if size > 1), 1)
    assert neighbors(target, ids[:inner])


def test_chosen_devices_keep_their_order():
    mesh = Mesh(["fsdp"], devices=[3, 1, 2, 0], target="v5e:2x2")
    assert mesh.device_ids == (3, 1, 2, 0)
    with pytest.raises(TargetError, match="9 devices, and h100:1x8 has 8"):
        Mesh(["fsdp"], devices=range(9), target="h100:1x8")


def test_a_size_of_minus_one_takes_all_devices_of_the_target():
    target = Target.parse("h100:2x8")
    mesh = Mesh(["fsdp", "tp"], shape=(-1, 2), target=target)
    assert (mesh.shape, mesh.idle_device_ids) == ({"fsdp": 8, "tp": 2}, ())
    assert Mesh(["tp"], shape=(12,), target=target).idle_device_ids == (12, 13, 14, 15)


def test_nothing_runs_on_a_target():
    mesh = Mesh(["fsdp"], shape=(8,), target=Target.parse("h100:1x8", "cpu"))
    assert mesh.is_abstract
    assert Mesh.of(mesh.compile_mesh) == mesh
    assert mesh != Mesh(["fsdp"], devices=range(8))
    with pytest.raises(AbstractMeshError, match="fsdp mesh, 8 on h100:1x8"):
        _ = mesh.jax


# --- several slices


@pytest.mark.parametrize(
    ("target", "shape", "crossing"),
    [
        ("v5e:4x4*2", {"dp": 2, "fsdp": 16}, {"dp": 2}),
        ("v5e:4x4*2", {"dp": 4, "fsdp": 8}, {"dp": 2}),  # 2 slices × 2 inside
        ("v5e:2x2*4", {"pp": 2, "dp": 4, "fsdp": 2}, {"pp": 2, "dp": 2}),
        ("v5e:2x2*6", {"dp": 3, "pp": 4, "tp": 2}, {"dp": 3, "pp": 2}),
        ("v5e:4x4*2", {"dp": 1, "fsdp": 32}, {"fsdp": 2}),
        ("v5e:4x4*2", {"dp": 2, "fsdp": 8}, {}),  # one of the slices
        ("gb200:18x4*8", {"dp": 8, "fsdp": 72}, {"dp": 8}),
        ("h100:4x8", {"dp": 4, "tp": 8}, {}),
    ],
)
def test_the_first_axes_cross_slices(target, shape, crossing):
    mesh = Mesh([*shape], shape=[*shape.values()], target=target)
    assert mesh.dcn_shape == crossing
    assert len({*mesh.device_ids}) == mesh.size


def test_inner_axes_go_along_the_torus_of_each_slice():
    mesh = Mesh(["dp", "fsdp", "tp"], shape=(2, 4, 4), target="v5e:4x4*2")
    for first in range(0, 32, 4):
        assert neighbors(mesh.target, mesh.device_ids[first : first + 4])


@pytest.mark.parametrize("chosen", [{"shape": (24,)}, {"devices": [0, 1, 16]}])
def test_more_devices_of_one_slice_than_of_another_are_refused(chosen):
    # libtpu ends the process where it compiles for them.
    with pytest.raises(TargetError, match="more devices of one slice than of another"):
        Mesh(["dp"], **chosen, target="v5e:4x4*2")


@pytest.mark.parametrize(("axis", "warns"), [("dp", False), ("tp", True)])
def test_a_program_whose_slices_exchange_much_begins_with_a_warning(axis, warns):
    mesh = Mesh([axis], shape=(8,), target=Target.parse("v5e:2x2*2", "cpu"))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert mesh.compile_mesh.size == 8
    assert [str(each.message).partition(";")[0] for each in found] == warns * [
        "axes that send much cross slices, over slow links: tp"
    ]


@pytest.fixture
def two_slices(monkeypatch):
    """A machine with the devices of two TPU slices, of which it knows the numbers."""
    chips = device_layout._chips(Target.parse("v5e:2x4*2"))
    by_id = {100_000 * (chip.slice_index + 1) + chip.id % 8: chip for chip in chips}
    here = [dataclasses.replace(chip, id=number) for number, chip in by_id.items()]

    def find(ids):
        return [here[i] for i in ids] if max(ids) < 16 else [by_id[i] for i in ids]

    monkeypatch.setattr(device_layout, "find_devices", find)
    return tuple(by_id)


def test_slices_that_are_here_are_laid_out_as_those_of_a_target(two_slices):
    placed = Mesh(["dp", "fsdp"], shape=(2, 8), target="v5e:2x4*2").device_ids
    assert device_layout.grid_here((2, 8), tuple(range(16))) == placed
    by_number = device_layout.grid_here((2, 8), two_slices)
    assert [two_slices.index(each) for each in by_number] == [*placed]
    mesh = Mesh(["dp", "fsdp"], devices=by_number, shape=(2, 8))
    assert mesh.slices == (0,) * 8 + (1,) * 8
    with pytest.raises(TargetError, match="8 of slice 0, 4 of slice 1"):
        device_layout.grid_here((12,), tuple(range(12)))


def test_devices_of_one_slice_or_of_none_keep_their_order(two_slices, monkeypatch):
    assert device_layout.grid_here((4, 2), tuple(range(8))) == tuple(range(8))
    monkeypatch.undo()
    assert device_layout.grid_here((2, 4), (3, 2, 1, 0, 4, 5, 6, 7))[:2] == (3, 2)
