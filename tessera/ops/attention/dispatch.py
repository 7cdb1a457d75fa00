# SPDX-License-Identifier: Apache-2.0
"""Which implementation of attention a call gets.

An implementation is a module with two functions:

    def attend(operands: Operands, setting: Setting) -> Array:
        '''What the queries read: [B, H, S, D] in the dtype of q. Differentiable.'''

    def why_not(operands: Operands, setting: Setting, device: Device) -> str | None:
        '''Why it cannot serve such a call there, as half a sentence; or None.'''

``why_not`` looks at shapes and dtypes alone: what it is given may be tracers or
``jax.ShapeDtypeStruct``. The first one of ``IMPLEMENTATIONS`` that has no reason
against a call serves it, so the faster come first; ``reference`` comes last and serves
all. One that can do more than it is fast at has a third function, ``why_not_unasked``,
like ``why_not``: for what that names, it serves only calls that ask for it by name.

Modules are imported when they are first asked, so that ``import tessera`` loads no
kernel language. A call is traced inside a scope and a program of its implementation's
name, ``flash_attention_xla`` say, which is what ``graph.trace`` shows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Literal, TypeAlias, cast, get_args

import jax
from jax import Array

from tessera.errors import ImplementationError, did_you_mean
from tessera.ops.attention.attention_call import Operands, Setting

Name: TypeAlias = Literal["cudnn", "pallas", "xla", "reference"]
IMPLEMENTATIONS: Final[tuple[str, ...]] = get_args(Name)
# Those whose matmuls are in the dtype of the operands, which nothing can change later.
KERNELS: Final = ("cudnn", "pallas")
# Those that take a window which is known only at run time.
_LATER_WINDOWS: Final = ("xla", "reference")
_PACKAGE = "tessera.ops.attention"


@dataclass(frozen=True)
class Device:
    """What the choice knows of the device that will run the call.

    Attributes:
      platform: ``cpu``, ``cuda``, ``rocm`` or ``tpu``.
      kind: As its maker calls it: ``NVIDIA H200``.
      capability: Of CUDA: (9, 0) is Hopper. Else (0, 0).
    """

    platform: str
    kind: str = ""
    capability: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, device: jax.Device) -> "Device":
        """Of a device that exists."""
        text = str(getattr(device, "compute_capability", ""))
        major, _, minor = text.partition(".")
        if device.platform != "gpu":
            return cls(device.platform, device.device_kind)
        if not (major.isdigit() and minor.isdigit()):
            return cls("rocm", device.device_kind)
        return cls("cuda", device.device_kind, (int(major), int(minor)))

    @classmethod
    def here(cls) -> "Device":
        """Of the device that JAX computes on unless it is told otherwise."""
        default = getattr(jax.config, "jax_default_device", None)
        if isinstance(default, jax.Device):
            return cls.of(default)
        return cls.of(jax.local_devices(backend=default)[0])


def choose(operands: Operands, setting: Setting, device: Device) -> Name:
    """The fastest implementation that serves such a call there."""
    return next(
        cast("Name", name)
        for name in IMPLEMENTATIONS
        if reason_against(name, operands, setting, device) is None
        and _is_fast(name, operands, setting, device)
    )


def _is_fast(name: str, operands: Operands, setting: Setting, device: Device) -> bool:
    why_not = getattr(_module(name), "why_not_unasked", None)
    return why_not is None or why_not(operands, setting, device) is None


def reason_against(
    name: str, operands: Operands, setting: Setting, device: Device
) -> str | None:
    """Why an implementation cannot serve such a call there; or None."""
    if operands.window is not None and name not in _LATER_WINDOWS:
        return f"{name} has to know the window before the call runs"
    return _module(name).why_not(operands, setting, device)


def check_choice(
    name: str, operands: Operands, setting: Setting, device: Device
) -> Name:
    """An implementation that was asked for by name.

    Raises:
      ImplementationError: [T406] there is no such one, or it cannot serve this call.
    """
    if name not in IMPLEMENTATIONS:
        known = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ImplementationError(
            f"flash_attention has no implementation {name!r}",
            got=f"implementation={name!r}",
            fix=f"use one of {known}, or None for the fastest that fits"
            + did_you_mean(name, IMPLEMENTATIONS),
        )
    if reason := reason_against(name, operands, setting, device):
        others = [
            repr(other)
            for other in IMPLEMENTATIONS
            if reason_against(other, operands, setting, device) is None
        ]
        raise ImplementationError(
            f"implementation {name!r} of flash_attention cannot serve this call",
            got=reason,
            fix=f"use {' or '.join(others)}, or None for the fastest that fits",
        )
    return cast("Name", name)


def attend(name: Name, operands: Operands, setting: Setting) -> Array:
    """What the queries read, by the implementation of that name."""
    return _program(name)(operands, setting)


def _module(name: str) -> Any:
    return import_module(f"{_PACKAGE}.{name}")


_programs: dict[str, Callable[[Operands, Setting], Array]] = {}


def _program(name: str) -> Callable[[Operands, Setting], Array]:
    """Calls that are alike share a program where nothing is traced around them."""
    if name not in _programs:

        def program(operands: Operands, setting: Setting) -> Array:
            with jax.named_scope(program.__name__):
                return _module(name).attend(operands, setting)

        program.__name__ = f"flash_attention_{name}"
        _programs[name] = jax.jit(program, static_argnums=1)
    return _programs[name]
