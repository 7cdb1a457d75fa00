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
from tessera.train.planner.products import Lookup
from tessera.train.planner.workload import Parameter, Workload

_F32: Final = 4
_DATA_AXES: Final = ("dp", "fsdp", "ep_outer", "ep", "cp")


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective of a step.

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


class Communication:
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
        self._layered = self.work.layered()
        products = {each.path for each in self.work.products}
        looked_up = {each.path for each in self.work.lookups}
        # Their rows are exchanged, and no more of them.
        self._exchanged = set() if layout.schedule else looked_up - products

    def of_microbatch(self) -> list[Transfer]:
        """The collectives of the forward and backward pass of one microbatch."""
        found = [*self._parameters(), *self._tensor_parallel(), *self._context()]
        found += self._experts()
        if not self.layout.schedule:
            found += self._sums()
        return found

    def of_step(self) -> list[Transfer]:
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
        return [*found, Transfer(("dp",), "all-gather", nbytes, 1, False)]

    def of_tick(self) -> list[Transfer]:
        """What one stage of a pipeline sends on, and back, in each tick."""
        nbytes = self._tokens * self._width * self._item
        return [Transfer(("pp",), "collective-permute", nbytes, 2, False)]

    @property
    def _gathers_once(self) -> bool:
        return self.layout.gather == "step"

    @property
    def _tokens(self) -> float:
        """Tokens of a microbatch on one device."""
        share = self.layout.micro_batch_size / self.device.place.size("context")
        return share * self.work.sequence_length

    @property
    def _width(self) -> float:
        """Numbers of the residual stream for each token."""
        tokens = self.work.sequence_length * self._item
        return max((each.nbytes / tokens for each in self.work.lookups), default=0.0)

    def _parameters(self) -> Iterator[Transfer]:
        for each in self.work.parameters:
            if each.path not in self._exchanged:
                yield from self._gathers(each)
                if each.is_trained:
                    yield from self._reductions(each)
        if "fsdp" not in self.sizes or self.layout.schedule:
            return
        share = self._tokens / self.work.sequence_length
        for row in self.work.lookups:
            nbytes = self._there_and_back(row) * share
            yield Transfer(("fsdp",), "all-to-all", nbytes, 1, False, False)

    def _sharded_over(self, each: Parameter) -> tuple[str, ...]:
        axes = self.device.axes(each.names)
        return tuple(axis for axis in self.sizes if axis in axes)

    def _gathers(self, each: Parameter) -> Iterator[Transfer]:
        axes = [axis for axis in self._sharded_over(each) if axis == "fsdp"]
        axes = [] if self._gathers_once else axes
        if self.layout.zero_stage == 3 and "dp" in self.sizes:
            axes.append("dp")
        if not axes:
            return
        calls = self.work.num_layers if each.is_layered else 1
        # Of all layers, as in _reductions.
        local = self.device.scalars(each, without=(*axes, "pp"))
        # The backward pass of a pipeline's stage begins with its forward pass.
        passes = 3.0 if self.layout.schedule else 2.0
        if not each.is_layered and not self.layout.schedule:
            passes = 1.0  # the logits keep it for the backward pass
        yield Transfer(
            tuple(axes),
            "all-gather",
            local * self._item / calls,
            passes * calls,
            hides=True,
            in_layers=each.is_layered,
        )

    def _reductions(self, each: Parameter) -> Iterator[Transfer]:
        """Of a gradient, over the axes that its parameter is split over."""
        axes = self._scattered(each)
        if self._gathers_once:
            axes = tuple(axis for axis in axes if axis != "fsdp")
        if not axes:
            return
        # Of all layers, of which a prediction takes the share of each stage.
        calls, local = self._gradient(each, (*axes, "pp"))
        times = calls / self.sync_every
        kind = "reduce-scatter" if each.is_layered or self._is_single else "all-reduce"
        nbytes = local * self.work.reduced_itemsize
        yield Transfer(axes, kind, nbytes, times, True, each.is_layered)

    @property
    def _is_single(self) -> bool:
        """Whether gradients are those of one microbatch on whole sequences.

        Otherwise that of the embedding is summed whole before each device takes a part.
        """
        return self.layout.microbatches == 1 and "cp" not in self.sizes

    def _sums(self) -> list[Transfer]:
        """All-reduces of gradients over the axes along which parameters are copied.

        A pipeline has them once in each step.
        """
        found = []
        for each in self.work.parameters:
            over = {*self._sharded_over(each), *self._scattered(each)}
            axes = tuple(a for a in self.sizes if a in _DATA_AXES and a not in over)
            if each.is_trained and axes:
                scattered = self._scattered(each)
                calls, local = self._gradient(each, scattered)
                parts = math.prod(self.sizes[a] for a in scattered)
                nbytes = local * self.work.reduced_itemsize / parts
                times = calls / self.sync_every
                found.append(
                    Transfer(axes, "all-reduce", nbytes, times, True, each.is_layered)
                )
        return found

    def _stages(self) -> Iterator[Transfer]:
        """Of arrays such as the embedding, and of those that stages gather once."""
        once = ("fsdp",) if self._gathers_once else ()
        for each in self.work.parameters:
            over = once if each.is_layered else (*once, "pp")
            axes = tuple(axis for axis in self._sharded_over(each) if axis in over)
            if not axes:
                continue
            number = self.device.scalars(each, without=axes)
            item = self._item if each.is_layered else _F32
            yield Transfer(axes, "all-gather", number * item, 1, False, False)
            if each.is_trained:
                kind = "reduce-scatter" if once else "all-reduce"
                yield Transfer(axes, kind, number * _F32, 1, False, False)

    def _scattered(self, each: Parameter) -> tuple[str, ...]:
        axes = [axis for axis in self._sharded_over(each) if axis == "fsdp"]
        if self.layout.zero_stage >= 2 and "dp" in self.sizes:
            axes.append("dp")
        return tuple(axes)

    def _gradient(
        self, each: Parameter, without: tuple[str, ...]
    ) -> tuple[float, float]:
        """Parts of a gradient that come one after the other, and scalars of each.

        Args:
          each: The parameter.
          without: Axes over which the gradient is not split yet.
        """
        calls = self.work.num_layers if each.is_layered else 1
        return calls, self.device.scalars(each, without=without) / calls

    def _tensor_parallel(self) -> Iterator[Transfer]:
        if "tp" not in self.sizes:
            return
        share = self._tokens / self.work.sequence_length
        passes = 1 + self.work.recomputed[str(self.layout.remat)].products
        passes += bool(self.layout.schedule)
        inputs: dict[int, Transfer] = {}
        for each in self.work.products:
            rows, layered = each.rows * share, each.path in self._layered
            result, times = rows * each.outer * each.itemsize, each.times
            if self.device.split(each.inner_names) > 1:
                times *= passes if layered else 1
                yield Transfer(("tp",), "all-reduce", result, times, False, layered)
            elif self.device.split(each.outer_names) > 1:
                # The loss adds up its gradients in f32.
                item = self._item if layered else _F32
                nbytes = rows * each.inner * item
                inputs[each.source] = Transfer(
                    ("tp",), "all-reduce", nbytes, times, False, layered
                )
            elif "kv_heads" in each.outer_names:
                # Each device has the gradient of the copy that its queries used.
                yield Transfer(("tp",), "all-reduce", result, times, False, layered)
        yield from inputs.values()
        for row in self.work.lookups:
            if self.device.split(row.names) > 1:
                nbytes = self._there_and_back(row) * share
                yield Transfer(("tp",), "all-reduce", nbytes, 1, False, False)

    def _there_and_back(self, row: Lookup) -> float:
        """Bytes of the rows of one sequence, and of their gradients, which are f32."""
        is_trained = row.path in self.work.trained()
        return row.nbytes * (1 + is_trained * _F32 / self._item)

    def _context(self) -> Iterator[Transfer]:
        """A ring sends the block of each device to all others, forward and backward."""
        if "cp" not in self.sizes:
            return
        share = self._tokens / self.work.sequence_length
        hops = self.sizes["cp"] - 1
        again = self.work.recomputed[str(self.layout.remat)]
        passes = 2 + (again.inner_flops > 0)
        for each in self.work.products:
            if "kv_heads" in each.outer_names:
                numbers = each.rows * share * each.outer
                numbers /= self.device.split(each.outer_names)
                times = each.times * hops
                nbytes = numbers * self._item
                yield Transfer(
                    ("cp",), "collective-permute", nbytes, times * passes, True
                )
                yield Transfer(
                    ("cp",), "collective-permute", numbers * _F32, times, True
                )

    def _experts(self) -> Iterator[Transfer]:
        axes = tuple(axis for axis in self.sizes if axis in ("ep_outer", "ep"))
        if not axes:
            return
        share = self._tokens / self.work.sequence_length
        again = 1 + self.work.recomputed[str(self.layout.remat)].products
        seen: set[int] = set()
        for each in self.work.products:
            if "experts" not in each.outer_names or each.source in seen:
                continue
            seen.add(each.source)
            is_first = "mlp" in each.outer_names
            rows, inner, outer = self.device.local_dims(each)
            numbers = rows * share * (inner if is_first else outer)
            nbytes = numbers * self._item
            times = each.times * (1 + again)
            yield Transfer(axes, "all-to-all", nbytes, times, False)
