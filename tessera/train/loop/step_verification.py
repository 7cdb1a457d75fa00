# SPDX-License-Identifier: Apache-2.0
"""Repeats a step with the devices in another order and compares the results.

A device may compute wrong values without an error. With deterministic numerics a step
has the same bits on whichever devices it runs, so each position of the mesh is computed
by two devices and compared bit for bit. Where the two differ, a third order tells which
of them is wrong, by two votes of three: each process needs three devices for that.

The step donates its state, and the devices may have no room for a second one. So the
state before the step and the result are copied to the memory of the host, and the
repetition takes the place of the state. The order changes within each process: weights
do not cross hosts, and each process compares what it holds.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from itertools import compress
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils

from tessera.errors import WrongValuesError
from tessera.foundations.tree import Tree
from tessera.mesh import Mesh
from tessera.train.checkpoints.saving import Checkpoints
from tessera.train.loop.build_run import Run
from tessera.train.loop.console import log
from tessera.train.loop.host_copy import HostCopy
from tessera.train.loop.train_state import TrainState

Metrics: TypeAlias = dict[str, Any]


class StepVerification:
    """Takes steps that are repeated, as ``runtime.verify_every`` says.

    Args:
      run: The run.
      on_phase: Called with the phase that begins and the step.
      checkpoints: Of the run; those that are not verified are renamed before an error.
    """

    def __init__(
        self,
        run: Run,
        on_phase: Callable[[str, int], None],
        checkpoints: Checkpoints | None,
    ) -> None:
        self._run, self._on_phase = run, on_phase
        self._checkpoints = checkpoints
        self._runs: dict[int, Run] = {}

    def is_due(self, step: int) -> bool:
        """Whether this step is to be repeated."""
        every = self._run.config.runtime.verify_every
        return bool(every) and step % every == 0

    def take(
        self, step: int, state: TrainState, batch: Tree
    ) -> tuple[TrainState, Metrics]:
        """Take a step twice; like ``run.step``, which donates the state.

        Args:
          step: Its number. All processes take it, with no other step in flight.
          state: The state before it.
          batch: Its batch.

        Raises:
          WrongValuesError: [T716] the results differ, or copies of one array before
            the step do.
        """
        run, mesh = self._run, self._run.mesh
        before, data = HostCopy.of((state,), mesh), HostCopy.of(batch, mesh)
        if any(odd := _agreed(before.odd_copies(), mesh)):
            devices = _listed(compress(mesh.jax.devices.flat, odd))
            found = f"copies of the state differ before the step, on {devices}"
            raise self._error(step, found)
        new, metrics = run.step(state, batch)
        first = HostCopy.of((new, metrics), mesh)
        del new, state
        second = self._differences(1, step, before, data, first)
        if any(second):
            found = self._explain(step, before, data, first, second)
            raise self._error(step, found)
        where = "other devices" if self._num_orders > 1 else "the same devices"
        log.info("step %d is verified: equal bits on %s", step, where)
        if self._checkpoints is not None:
            self._checkpoints.mark_verified(step)
        return first.placed((run.abstract_state,))[0], metrics

    def _error(self, step: int, found: str) -> WrongValuesError:
        """T716, once no checkpoint is left that may hold wrong values."""
        log.warning("step %d: %s", step, found)
        if self._checkpoints is not None:
            self._checkpoints.discard_unverified()
        if jax.process_count() > 1:
            # A process that ends takes the first one with it, which renames them.
            multihost_utils.sync_global_devices("tessera/unverified")
        return WrongValuesError(
            "a step cannot be repeated: a device computes wrong values",
            got=f"step {step}: {found}",
            fix="take the device out, or its machine, and start the same command with "
            "training.resume=auto: it goes on from the last verified checkpoint, "
            "or where this run began",
        )

    @cached_property
    def _num_orders(self) -> int:
        """In how many orders every position is on another device, three at most."""
        devices = self._run.mesh.jax.devices.flat
        return min(3, *Counter(device.process_index for device in devices).values())

    def _rotated(self, by: int, step: int) -> Run:
        """The same run on the same devices in another order, compiled."""
        if self._num_orders == 1:
            return self._run
        if by not in self._runs:
            self._on_phase("compile", step)
            mesh = rotated(self._run.mesh, by)
            self._runs[by] = Run(self._run.config, mesh)
            _ = self._runs[by].compiled
        self._on_phase("step", step)
        return self._runs[by]

    def _differences(
        self, by: int, step: int, before: HostCopy, data: HostCopy, first: HostCopy
    ) -> list[bool]:
        """At which positions of the mesh a repetition differs, on any process."""
        run = self._rotated(by, step)
        (state,) = before.placed((run.abstract_state,))
        again = HostCopy.of(run.step(state, data.placed(run.abstract_batch)), run.mesh)
        return _agreed(first.unequal(again), run.mesh)

    def _explain(
        self,
        step: int,
        before: HostCopy,
        data: HostCopy,
        first: HostCopy,
        second: list[bool],
    ) -> str:
        """Which devices the values differ on, by the votes of a third order."""
        mesh, votes = self._run.mesh, [second]
        if self._num_orders == 3:
            votes.append(self._differences(2, step, before, data, first))
        orders = [rotated(mesh, by).jax.devices.flat for by in range(len(votes) + 1)]
        suspects = set[jax.Device]()
        for at, differs in enumerate(zip(*votes, strict=True)):
            if any(differs):
                suspects.update(orders[order][at] for order in _outvoted(differs))
        how = "in another order" if self._num_orders > 1 else "on the same devices"
        text = f"repeated {how}, values differ on {_listed(suspects)}"
        if len(suspects) > 1:
            text += ": one of them, but a sum over devices spreads what one computes"
        return text


def _outvoted(differs: tuple[bool, ...]) -> list[int]:
    """The orders that may be wrong, by whether the others differ from the first."""
    if len(differs) == 1:
        return [0, 1]
    # The one of the three orders that the other two disagree with.
    in_second, in_third = differs
    return [0 if in_second and in_third else 1 if in_second else 2]


def rotated(mesh: Mesh, by: int) -> Mesh:
    """The same mesh with the devices of each process moved on by some positions."""
    devices = list(mesh.jax.devices.flat)
    positions = defaultdict[int, list[int]](list)
    for at, device in enumerate(devices):
        positions[device.process_index].append(at)
    ids = [device.id for device in devices]
    for own in positions.values():
        for index, at in enumerate(own):
            ids[at] = devices[own[(index + by) % len(own)]].id
    return Mesh(mesh.axes, devices=ids, shape=tuple(mesh.shape.values()))


def _agreed(positions: Collection[int], mesh: Mesh) -> list[bool]:
    """For each position of the mesh, whether any process names it."""
    named = [at in positions for at in range(mesh.size)]
    if jax.process_count() > 1:
        gathered = multihost_utils.process_allgather(np.array(named))
        named = np.any(np.asarray(gathered), axis=0).tolist()
    return named


def _listed(devices: Iterable[jax.Device]) -> str:
    names = [
        f"device {device.id}"
        + (f" of process {device.process_index}" if jax.process_count() > 1 else "")
        for device in sorted(devices, key=lambda device: device.id)
    ]
    return ", ".join(names)
