# SPDX-License-Identifier: Apache-2.0
"""Meshes that cannot be: each mistake has its code, its arithmetic and a fix."""

import numpy as np
import pytest

from tessera.errors import (
    DeviceIdError,
    DuplicateAxisError,
    MeshShapeError,
    TesseraError,
    UnknownAxisError,
)
from tessera.foundations.device_grid import MAX_DEVICES
from tessera.mesh import Mesh


def message_of(kind: type[TesseraError], **arguments: object) -> str:
    with pytest.raises(kind) as caught:
        Mesh(**arguments)
    return str(caught.value)


def test_a_ragged_nesting_names_its_rows():
    assert message_of(MeshShapeError, axes=["a", "b"], devices=[[0, 1], [2]]) == (
        "[T101] the nested device list is not a full grid\n"
        "  got: [[0, 1], [2]]: rows of 1 and 2 devices\n"
        "  fix: give every row the same number of devices\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T101.html"
    )


def test_a_nesting_of_another_depth_than_the_axes():
    assert message_of(MeshShapeError, axes=["tp", "dp"], devices=[[[0, 1]]]) == (
        "[T101] the nesting of devices has one level per axis\n"
        "  got: 2 axes ('tp', 'dp'), devices nested 1 × 1 × 2\n"
        "  fix: name 3 axes, or give devices as a flat sequence\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T101.html"
    )


def test_a_nesting_that_contradicts_the_shape():
    message = message_of(
        MeshShapeError, axes=["a", "b"], devices=[[0, 1], [2, 3]], shape=(4, 1)
    )
    assert "got: devices nested 2 × 2, shape 4 × 1" in message


def test_a_product_that_does_not_match_shows_the_arithmetic():
    assert message_of(
        MeshShapeError, axes=["tp", "dp"], devices=range(16), shape=(4, 3)
    ) == (
        "[T101] the shape does not hold the devices\n"
        "  got: tp 4 × dp 3 = 12, and 16 devices\n"
        "  fix: use the shape 4 × 4 or 8 × 2, or list 12 devices\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T101.html"
    )


def test_a_size_that_cannot_be_inferred_names_the_nearest_device_counts():
    assert message_of(
        MeshShapeError, axes=["tp", "dp"], devices=range(10), shape=(4, -1)
    ) == (
        "[T101] the shape does not hold the devices\n"
        "  got: tp 4 × dp -1: 4 does not divide 10 devices\n"
        "  fix: use the shape 2 × 5 or 1 × 10, or 8 or 12 devices\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T101.html"
    )


@pytest.mark.parametrize("shape", [(0, 8), (-2, 4), (-1, -1), (2.0, 4), (True, 8)])
def test_sizes_are_positive_whole_numbers(shape):
    message = message_of(MeshShapeError, axes=["a", "b"], shape=shape)
    assert f"got: shape {shape!r}" in message


def test_there_is_one_size_per_axis():
    message = message_of(MeshShapeError, axes=["a"], devices=range(8), shape=(2, 4))
    assert "got: 1 axes ('a',), 2 sizes (2, 4)" in message


@pytest.mark.full
def test_a_mesh_of_a_million_devices_is_declared():
    """Work that grew with the square of their number would not end."""
    count = 10**6
    mesh = Mesh(["tp", "dp"], devices=range(count))
    assert mesh.shape == {"tp": 1 << 6, "dp": count >> 6}
    grid = np.arange(count).reshape(1000, 1000)
    assert Mesh(["a", "b"], devices=grid).shape == {"a": 1000, "b": 1000}
    twice = [*range(count), *range(9)]
    message = message_of(DeviceIdError, axes=["dp"], devices=twice)
    assert "8 repeated" in message
    assert len(message) < 500


ABSURD = {
    "shape": {"shape": (10**20, 2)},
    "NumPy sizes": {"shape": (np.int64(2) ** 40, np.int64(2) ** 40)},
    "a size of many digits": {"shape": (10**6000, 2)},
    "a negative size": {"shape": (-(10**6000), 2)},
    "range": {"devices": range(10**20)},
    "a range backwards": {"devices": range(10**20, 0, -1)},
    "rows": {"devices": [range(10**9), range(10**9, 2 * 10**9)]},
    "just one more": {"shape": (MAX_DEVICES + 1, 1)},
}


@pytest.mark.parametrize("arguments", ABSURD.values(), ids=ABSURD)
def test_more_devices_than_any_machine_has_are_refused_before_anything_is_made(
    arguments,
):
    message = message_of(MeshShapeError, axes=["a", "b"], **arguments)
    assert message.startswith("[T101] a mesh has at most 1,048,576 devices\n")
    assert len(message) < 500


def test_what_is_said_of_too_many_devices():
    assert message_of(MeshShapeError, axes=["dp", "tp"], shape=(10**20, 2)) == (
        "[T101] a mesh has at most 1,048,576 devices\n"
        "  got: shape of 200,000,000,000,000,000,000 devices\n"
        "  fix: check the sizes: they multiply to the number of devices\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T101.html"
    )


def test_the_largest_mesh_is_declared():
    assert Mesh(["dp"], shape=(MAX_DEVICES,)).size == MAX_DEVICES


def test_more_axes_than_a_grid_can_have_are_refused():
    names = [f"a{i}" for i in range(100_000)]
    message = message_of(MeshShapeError, axes=names)
    assert message.startswith("[T101] a mesh has at most 32 axes\n")
    assert len(message) < 500
    nested: list = [0]
    for _ in range(100_000):
        nested = [nested]
    assert "nested deeper" in message_of(MeshShapeError, axes=["dp"], devices=nested)


def test_device_ids_have_31_bits():
    message = message_of(DeviceIdError, axes=["dp"], devices=[0, 10**6000])
    assert "got: a number of more than 31 bits" in message


def test_a_mesh_has_an_axis():
    assert "at least one axis" in message_of(MeshShapeError, axes=[])


def test_a_repeated_axis_is_named():
    assert message_of(DuplicateAxisError, axes=["tp", "dp", "tp"]) == (
        "[T102] a mesh names one axis twice\n"
        "  got: axes ('tp', 'dp', 'tp'): 'tp' is repeated\n"
        "  fix: give every axis a name of its own\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T102.html"
    )


@pytest.mark.parametrize("name", ["", 3, None])
def test_an_axis_is_named_by_a_string(name):
    message = message_of(DuplicateAxisError, axes=["dp", name])
    assert f"{name!r} is not a non-empty string" in message


def test_an_unknown_axis_comes_with_a_guess(grid_mesh):
    with pytest.raises(UnknownAxisError) as caught:
        grid_mesh.axis_size("tpp")
    assert str(caught.value) == (
        "[T103] the mesh has no axis 'tpp'\n"
        "  got: dp × tp mesh, 2 × 4\n"
        "  fix: did you mean 'tp'? Known: 'dp', 'tp'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T103.html"
    )


def test_a_repeated_device_is_named():
    assert message_of(DeviceIdError, axes=["dp"], devices=[0, 1, 1, 3]) == (
        "[T104] a mesh holds one device twice\n"
        "  got: device ids 0, 1, 1, 3: 1 repeated\n"
        "  fix: list every device once\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T104.html"
    )


@pytest.mark.parametrize("devices", [[0, -1], [0, 1.5], [True, 2], ["gpu0"]])
def test_a_device_id_is_a_whole_number_from_zero(devices):
    message = message_of(DeviceIdError, axes=["dp"], devices=devices)
    assert "a device id is not a whole number from 0 up" in message


@pytest.mark.parametrize("devices", [[], [[], []]])
def test_a_mesh_has_a_device(devices):
    assert "at least one device" in message_of(
        DeviceIdError, axes=["dp"], devices=devices
    )


def test_a_number_of_devices_is_no_list_of_them():
    assert "write devices=range(8)" in message_of(DeviceIdError, axes=["dp"], devices=8)
