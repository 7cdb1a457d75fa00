# SPDX-License-Identifier: Apache-2.0
"""A training step that one device computes wrongly."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import numpy as np


class Flipped:
    """A step whose result has one bit flipped, on one device and at some calls.

    Args:
      step: The step.
      device: The id of the device.
      calls: Numbers of the calls, from 1.
    """

    def __init__(self, step: Any, device: int, calls: Collection[int]) -> None:
        self._step, self._device, self._calls, self._call = step, device, calls, 0

    def __call__(self, state: Any, batch: Any) -> Any:
        self._call += 1
        state, metrics = self._step(state, batch)
        if self._call in self._calls:
            leaves, treedef = jax.tree.flatten(state.params)
            leaves[0] = self._with_flipped_bit(leaves[0])
            params = jax.tree.unflatten(treedef, leaves)
            state = dataclasses.replace(state, params=params)
        return state, metrics

    def _with_flipped_bit(self, array: jax.Array) -> jax.Array:
        shards = []
        for shard in array.addressable_shards:
            data = np.array(shard.data)
            if shard.device.id == self._device:
                data.reshape(-1).view(np.uint32)[0] ^= 1
            shards.append(jax.device_put(data, shard.device))
        return jax.make_array_from_single_device_arrays(
            array.shape, array.sharding, shards
        )
