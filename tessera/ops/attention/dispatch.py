# SPDX-License-Identifier: Apache-2.0
"""Dispatch of a call of ``flash_attention`` to an implementation.

An implementation is a module with two functions:

    def attend(operands: Operands, options: Options) -> Array:
        '''The output of the queries: [B, H, S, D] in the dtype of q. Differentiable.'''

    def unsupported_reason(
        operands: Operands, options: Options, device: Device
    ) -> str | None:
        '''Why it does not support such a call there, as a clause; or None.'''

``unsupported_reason`` reads shapes and dtypes only: operands may be tracers or
``jax.ShapeDtypeStruct``. The first of ``IMPLEMENTATIONS`` that supports a call serves
it, so they are in order of speed; ``xla`` is last and supports every call.

A query attends to the keys of its own segment; with ``causal`` only to those at or
before its position, and with a window of w to the last w of these.

The modules are imported at their first use, so that ``import tessera`` loads no kernel
language. A call is traced inside a scope and a program with the name of its
implementation, such as ``flash_attention_xla``, which ``graph.trace`` shows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple

import jax
from jax import Array

from tessera.errors import ImplementationError, did_you_mean
from tessera.jax_compat.workarounds import CorrectJit
from tessera.tracing import scope

IMPLEMENTATIONS: Final = ("cudnn", "splash", "xla")
# Those whose matmuls are in the dtype of the operands; no pass can change that.
KERNELS: Final = ("cudnn", "splash")
# The platform of kernels. Elsewhere their modules are not imported: the import of
# Pallas changes what JAX caches by, and all that ran before would compile again.
_PLATFORMS: Final = {"cudnn": ("cuda", "NVIDIA GPUs"), "splash": ("tpu", "TPUs")}
_PACKAGE = "tessera.ops.attention"


class Operands(NamedTuple):
    """The arrays of a call.

    Attributes:
      q: ``[B, H, S, D]``.
      k: ``[B, G, T, D]``, G dividing H; head h of q attends to ``h // (H / G)`` of k.
      v: ``[B, G, T, D]``.
      segments: int32 ``[B, S]``, or None where a sequence is one segment.
      window: int32 scalar that replaces ``Options.window``, or None.
      sinks: ``[H]``, a score of each head beside those of its keys, or None.
    """

    q: Array
    k: Array
    v: Array
    segments: Array | None = None
    window: Array | None = None
    sinks: Array | None = None


@dataclass(frozen=True)
class Options:
    """The static arguments of a call.

    Attributes:
      causal: Whether a query attends only to keys at or before its position.
      scale: The factor of the products of queries and keys.
      window: How many positions back a causal query attends, including its own.
      soft_cap: Scaled scores s become ``soft_cap * tanh(s / soft_cap)``.
    """

    causal: bool
    scale: float
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True)
class Device:
    """The device that will run a call, as far as dispatch depends on it.

    Attributes:
      platform: ``cpu``, ``cuda``, ``rocm`` or ``tpu``.
      kind: The vendor's name: ``NVIDIA H200``.
      capability: The CUDA compute capability, (9, 0) for Hopper; else (0, 0).
    """

    platform: str
    kind: str = ""
    capability: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, device: jax.Device) -> "Device":
        """The description of an existing device."""
        text = str(getattr(device, "compute_capability", ""))
        major, _, minor = text.partition(".")
        if device.platform != "gpu":
            return cls(device.platform, device.device_kind)
        if not (major.isdigit() and minor.isdigit()):
            return cls("rocm", device.device_kind)
        return cls("cuda", device.device_kind, (int(major), int(minor)))

    @classmethod
    def here(cls) -> "Device":
        """The device that the code being traced will run on; see ``scope.device``."""
        return cls.of(scope.device())


def fastest(operands: Operands, options: Options, device: Device) -> str:
    """The first implementation that supports such a call, split as it may be."""
    return next(
        name
        for name in IMPLEMENTATIONS
        if unsupported_reason(name, operands, options, device) is None
        and not (name == "splash" and _may_be_split())
    )


def _may_be_split() -> bool:
    """Whether the operands may be split over devices; XLA cannot split splash."""
    mesh = jax.sharding.get_abstract_mesh()
    in_region = mesh.axis_names and set(mesh.manual_axes) == set(mesh.axis_names)
    return scope.num_devices() > 1 and not in_region


def unsupported_reason(
    name: str, operands: Operands, options: Options, device: Device
) -> str | None:
    """Why an implementation does not support such a call there; or None."""
    if name in _PLATFORMS:
        platform, devices = _PLATFORMS[name]
        if device.platform != platform:
            return f"{name} runs on {devices}, and this call on {device.platform}"
    if operands.window is not None and name != "xla":
        return f"{name} has to know the window before the call runs"
    if operands.sinks is not None and name != "xla":
        return f"{name} has no sinks"
    return _module(name).unsupported_reason(operands, options, device)


def check_supported(
    name: str, operands: Operands, options: Options, device: Device
) -> str:
    """The implementation that a call asked for by name.

    Raises:
      ImplementationError: [T406] there is no such one, or it does not support the call.
    """
    if name not in IMPLEMENTATIONS:
        known = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ImplementationError(
            f"flash_attention has no implementation {name!r}",
            got=f"implementation={name!r}",
            fix=f"use one of {known}, or None for the fastest that fits"
            + did_you_mean(name, IMPLEMENTATIONS),
        )
    if reason := unsupported_reason(name, operands, options, device):
        others = [
            repr(other)
            for other in IMPLEMENTATIONS
            if unsupported_reason(other, operands, options, device) is None
        ]
        raise ImplementationError(
            f"implementation {name!r} of flash_attention cannot serve this call",
            got=reason,
            fix=f"use {' or '.join(others)}, or None for the fastest that fits",
        )
    return name


def attend(name: str, operands: Operands, options: Options) -> Array:
    """The output of the queries, by the implementation of that name."""
    return _program(name)(operands, options, Device.here())


def _module(name: str) -> Any:
    return import_module(f"{_PACKAGE}.{name}")


@cache
def _program(name: str) -> Callable[[Operands, Options, Device], Array]:
    """One compiled program per implementation: eager calls share it."""

    def program(operands: Operands, options: Options, device: Device) -> Array:
        del device  # what is traced depends on it
        with jax.named_scope(program.__name__):
            return _module(name).attend(operands, options)

    program.__name__ = f"flash_attention_{name}"
    return CorrectJit(program, static_argnums=(1, 2))
