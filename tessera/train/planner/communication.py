# SPDX-License-Identifier: Apache-2.0
"""Lists the collectives of a training step, by the rules that lower its layout.

- ``fsdp``: parameters of layers are gathered for the forward and for the backward
  pass, in the dtype of activations; rows that tokens choose are exchanged; gradients
  are reduce-scattered.
- ``dp``: gradients are all-reduced; ZeRO reduce-scatters them or gathers parameters.
- ``tp``: an all-reduce after each matmul whose contracted dim is split, and one of the
  input's gradient for those whose kept dim is.
- ``cp``: keys and values go around a ring, and their gradients.
- ``ep``: tokens go to their experts and back.
- ``pp``: activations and their gradients go from stage to stage. Where its stages
  gather once, the collectives of ``fsdp`` are those of a step.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tessera.train.planner.device_work import DeviceWork
from tessera.train.planner.layout import Layout
from tessera.train.planner.matmuls import Lookup
from tessera.train.planner.workload import Parameter, Workload

_F32: Final = 4
_DATA_AXES: Final = ("dp", "fsdp", "ep_outer", "ep", "cp")


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of one collective in a step.

    Attributes:
      axes: Mesh axes of its groups.
      kind: XLA's name, such as ``all-gather``.
      nbytes: As ``link_times.collective_seconds`` takes them.
      times: Calls in what it is listed for: a microbatch, or a step.
      hides: Whether computation that does not wait for it can run at the same time.
      in_layers: Whether layers have it, and not what is before and after them.
    """

    axes: tuple[str, ...]
    kind: str
    nbytes: float
    times: float
    hides: bool
    in_layers: bool = True


class StepCollectives:
    """The collectives of a workload in a layout.

    Args:
      device: The part of the workload that one device has.
      layout: Mesh and settings.
      sync_every: As ``training.sync_gradients_every``.
    """

    def __init__(self, device: DeviceWork, layout: Layout, sync_every: int = 1) -> None:
        self.device, self.layout, self.sync_every = device, layout, sync_every
        self.work: Workload = device.work
        self.sizes = {name: size for name, size in layout.mesh if size > 1}
        self._item = 2 if self.work.matmul_dtype != "float32" else _F32
        # Sequences of a microbatch on one device.
        self._share = layout.micro_batch_size / device.size("context")
        self._layered = self.work.layered()
        products = {each.path for each in self.work.products}
        looked_up = {each.path for each in self.work.lookups}
        # Their rows are exchanged, and no more of them.
        self._exchanged = set() if layout.schedule else looked_up - products

    def of_microbatch(self) -> list[Calls]:
        """The collectives of the forward and backward pass of one microbatch."""
        found = [*self._parameters(), *self.of_activations()]
        if not self.layout.schedule:
            found += self._sums()
        return found

    def of_activations(self) -> list[Calls]:
        """Those of a microbatch that are alike however ``dp`` and ``fsdp`` split it."""
        return [*self._tensor_parallel(), *self._context(), *self._experts()]

    def of_step(self) -> list[Calls]:
        """The collectives that a step has once."""
        stage = self.layout.zero_stage
        found = [*self._sums(), *self._stages()] if self.layout.schedule else []
        if stage not in (1, 2) or "dp" not in self.sizes:
            return found
        nbytes = sum(
            each.itemsize * self.device.scalars(each)
            for each in self.work.parameters
            if each.is_trained
        )
        return [*found, Calls(("dp",), "all-gather", nbytes, 1, False)]

    def of_tick(self) -> list[Calls]:
        """What one stage of a pipeline sends on, and back, in each tick."""
        # The residual stream is as wide as the rows of the embedding.
        nbytes = self._share * max(
            (each.nbytes for each in self.work.lookups), default=0.0
        )
        parts = self.device.parts_of_wire
        found = [Calls(("pp",), "collective-permute", nbytes / parts, 2, False)]
        if parts > 1:  # gathered where it arrives, and where a stage runs anew
            times = 2 + self.layout.recomputes_stages
            found.append(Calls(("tp",), "all-gather", nbytes, times, False))
        return found

    def _parameters(self) -> Iterator[Calls]:
        for each in self.work.parameters:
            if each.path not in self._exchanged:
                yield from self._gathers(each)
                if each.is_trained:
                    yield from self._reductions(each)
        if "fsdp" not in self.sizes or self.layout.schedule:
            return
        for row in self.work.lookups:
            nbytes = self._there_and_back(row) * self._share
            yield Calls(("fsdp",), "all-to-all", nbytes, 1, False, False)

    def _sharded_over(self, each: Parameter) -> tuple[str, ...]:
        axes = self.device.axes(each.names)
        return tuple(axis for axis in self.sizes if axis in axes)

    def _in_parts(self, each: Parameter, from_stage: int) -> tuple[str, ...]:
        """The axes over which each device has a part of a parameter or its gradient.

        Args:
          each: The parameter.
          from_stage: Of ZeRO, which splits it over ``dp``.
        """
        axes = [axis for axis in self._sharded_over(each) if axis == "fsdp"]
        if self.layout.zero_stage >= from_stage and "dp" in self.sizes:
            axes.append("dp")
        return tuple(axes)

    def _of_microbatch(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the axes along which each microbatch gathers and reduces."""
        once = ("fsdp",) if self.layout.gather == "step" else ()
        return tuple(axis for axis in axes if axis not in once)

    def _calls(self, each: Parameter) -> int:
        """Parts of a parameter that are sent one after the other."""
        return self.work.num_layers if each.is_layered else 1

    def _gathers(self, each: Parameter) -> Iterator[Calls]:
        axes, calls = self._of_microbatch(self._in_parts(each, 3)), self._calls(each)
        if not axes:
            return
        # Of all layers, as in _reductions.
        local = self.device.scalars(each, without=(*axes, "pp"))
        passes = 2 + self.layout.recomputes_stages
        if not each.is_layered and not self.layout.schedule:
            passes = 1  # the logits keep it for the backward pass
        item = min(self._item, each.itemsize)  # codes are gathered as they are stored
        nbytes, times = local * item / calls, passes * calls
        yield Calls(axes, "all-gather", nbytes, times, True, each.is_layered)

    def _reductions(self, each: Parameter) -> Iterator[Calls]:
        """Of a gradient, over the axes that its parameter is split over."""
        axes, calls = self._of_microbatch(self._in_parts(each, 2)), self._calls(each)
        if not axes:
            return
        # Of all layers, of which a prediction takes the share of each stage. On parts
        # of the batch, the embedding's is summed whole before each takes its part.
        is_whole = self.layout.microbatches > 1 or "cp" in self.sizes
        kind = "all-reduce" if is_whole and not each.is_layered else "reduce-scatter"
        local = self.device.scalars(each, without=(*axes, "pp")) / calls
        yield self._reduction(each, axes, kind, local)

    def _sums(self) -> Iterator[Calls]:
        """All-reduces of gradients over the axes along which parameters are copied.

        A pipeline has them once in each step.
        """
        for each in self.work.parameters:
            parts = self._in_parts(each, 2)
            over = {*self._sharded_over(each), *parts}
            axes = tuple(a for a in self.sizes if a in _DATA_AXES and a not in over)
            if each.is_trained and axes:
                local = self.device.scalars(each, without=parts) / self._calls(each)
                local /= math.prod(self.sizes[axis] for axis in parts)
                yield self._reduction(each, axes, "all-reduce", local)

    def _reduction(
        self, each: Parameter, axes: tuple[str, ...], kind: str, scalars: float
    ) -> Calls:
        nbytes = scalars * self.work.reduced_itemsize
        times = self._calls(each) / self.sync_every
        return Calls(axes, kind, nbytes, times, True, each.is_layered)

    def _stages(self) -> Iterator[Calls]:
        """Of arrays such as the embedding, and of those that stages gather once."""
        once = ("fsdp",) if self.layout.gather == "step" else ()
        for each in self.work.parameters:
            over = once if each.is_layered else (*once, "pp")
            axes = tuple(axis for axis in self._sharded_over(each) if axis in over)
            if not axes:
                continue
            number = self.device.scalars(each, without=axes)
            item = self._item if each.is_layered else _F32
            yield Calls(axes, "all-gather", number * item, 1, False, False)
            if each.is_trained:
                kind = "reduce-scatter" if once else "all-reduce"
                yield Calls(axes, kind, number * _F32, 1, False, False)

    def _tensor_parallel(self) -> Iterator[Calls]:
        if "tp" not in self.sizes:
            return
        passes = 1 + self.work.recomputed[str(self.layout.remat)].products
        passes += self.layout.recomputes_stages
        inputs: dict[int, Calls] = {}
        for each in self.work.products:
            rows, layered = each.rows * self._share, each.path in self._layered
            result, times = rows * each.outer * each.itemsize, each.times
            if self.device.split(each.inner_names) > 1:
                times *= passes if layered else 1
                yield Calls(("tp",), "all-reduce", result, times, False, layered)
            elif self.device.split(each.outer_names) > 1:
                # The loss adds up its gradients in f32.
                item = self._item if layered else _F32
                nbytes = rows * each.inner * item
                moved = Calls(("tp",), "all-reduce", nbytes, times, False, layered)
                inputs[each.source] = moved
            elif "kv_heads" in each.outer_names:
                # Each device has the gradient of the copy that its queries used.
                yield Calls(("tp",), "all-reduce", result, times, False, layered)
        yield from inputs.values()
        for row in self.work.lookups:
            if self.device.split(row.names) > 1:
                nbytes = self._there_and_back(row) * self._share
                yield Calls(("tp",), "all-reduce", nbytes, 1, False, False)

    def _there_and_back(self, row: Lookup) -> float:
        """Bytes of the rows of one sequence, and of their gradients, which are f32."""
        is_trained = row.path in self.work.trained()
        return row.nbytes * (1 + is_trained * _F32 / self._item)

    def _context(self) -> Iterator[Calls]:
        """A ring sends the block of each device to all others, forward and backward."""
        if "cp" not in self.sizes:
            return
        hops = self.sizes["cp"] - 1
        again = self.work.recomputed[str(self.layout.remat)]
        passes = 2 + (again.inner_flops > 0)
        for each in self.work.products:
            if "kv_heads" in each.outer_names:
                numbers = each.rows * self._share * each.outer
                numbers /= self.device.split(each.outer_names)
                times, kind = each.times * hops, "collective-permute"
                yield Calls(("cp",), kind, numbers * self._item, times * passes, True)
                yield Calls(("cp",), kind, numbers * _F32, times, True)

    def _experts(self) -> Iterator[Calls]:
        axes = tuple(axis for axis in self.sizes if axis in ("ep_outer", "ep"))
        if not axes:
            return
        again = 1 + self.work.recomputed[str(self.layout.remat)].products
        seen: set[int] = set()
        for each in self.work.products:
            if "experts" not in each.outer_names or each.source in seen:
                continue
            seen.add(each.source)
            is_first = "mlp" in each.outer_names
            rows, inner, outer = self.device.local_dims(each)
            numbers = rows * self._share * (inner if is_first else outer)
            nbytes = numbers * self._item
            times = each.times * (1 + again)
            yield Calls(axes, "all-to-all", nbytes, times, False)
