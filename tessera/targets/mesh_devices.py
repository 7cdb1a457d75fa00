# SPDX-License-Identifier: Apache-2.0
"""Finds the devices of a mesh by their ids, here or on its target."""

import math

import jax
from jax import Device

from tessera.targets.target import Target


def find_devices(ids: tuple[int, ...]) -> list[Device] | None:
    """The devices with these ids, or None if some do not exist.

    CPU clients of several processes number devices with gaps. Then ids below the device
    count are positions, so that a mesh counts from zero everywhere.
    """
    devices = sorted(jax.devices(), key=lambda device: device.id)
    by_id = {device.id: device for device in devices}
    if all(i in by_id for i in ids):
        return [by_id[i] for i in ids]
    if all(i < len(devices) for i in ids):
        return [devices[i] for i in ids]
    return None


def default_ids(
    shape: tuple[int, ...] | None, target: Target | None
) -> tuple[int, ...]:
    """Ids of all devices, or of as many as the shape has, even if too few exist."""
    if target is None:
        here = tuple(device.id for device in jax.devices())
    else:
        here = tuple(range(target.num_devices))
    if shape is None or -1 in shape:
        return here
    size = math.prod(shape)
    return here[:size] if size <= len(here) else tuple(range(size))
