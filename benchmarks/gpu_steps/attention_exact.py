# SPDX-License-Identifier: Apache-2.0
"""Attention, forward and backward, against NumPy in f64."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention import Case
from gpu_steps.other_kernels import others as other_kernels
from gpu_steps.rows import QUICK, Compiler, emit, errors_kept, relative_errors

from tessera import op
from tessera.ops.attention.dispatch import (
    IMPLEMENTATIONS,
    Device,
    Operands,
    Options,
    fastest,
    unsupported_reason,
)
from tests.ops.attention.exact import NAMES, drawn, exact


@dataclass(frozen=True)
class Call:
    """One call: its sizes, and the options of ``op.flash_attention``."""

    name: str
    width: int
    groups: int = 2
    queries: int = 512
    keys: int = 512
    dtype: str = "bfloat16"
    segments: int = 0
    options: dict[str, Any] = field(default_factory=lambda: {"causal": True})

    def drawn(self) -> tuple[Operands, jax.Array]:
        """Operands with their segments, and a gradient of the result."""
        operands, gradient = drawn(
            batch=2,
            heads=4,
            groups=self.groups,
            queries=self.queries,
            keys=self.keys,
            width=self.width,
            dtype=self.dtype,
        )
        if not self.segments:
            return operands, gradient
        draw = np.random.default_rng(1).integers(0, self.segments, (2, self.queries))
        ids = jnp.asarray(np.sort(draw, 1), jnp.int32)
        return operands._replace(segments=ids), gradient

    def settings(self) -> Options:
        """What the reference and the choice of a route read."""
        return Options(
            causal=self.options.get("causal", False),
            scale=self.width**-0.5,
            window=self.options.get("window"),
            soft_cap=self.options.get("soft_cap"),
        )


CALLS = (
    Call("causal", 64),
    Call("causal", 128),
    Call("causal", 256),
    Call("packed", 128, segments=5),
    Call("packed, window 100", 64, segments=5, options={"causal": True, "window": 100}),
    Call("packed", 256, segments=5),
    Call("packed, 100 segments", 64, segments=100),
    Call("full, 500 tokens", 128, queries=500, keys=500, options={}),
    Call("full, 700 keys", 64, keys=700, options={}),
    Call("window 200", 128, options={"causal": True, "window": 200}),
    Call("window 200, MHA", 256, groups=4, options={"causal": True, "window": 200}),
    Call("soft cap 20", 128, options={"causal": True, "soft_cap": 20.0}),
    Call("f16", 80, dtype="float16"),
    Call("f32", 64, dtype="float32"),
)


def calls() -> Iterator[Call]:
    """All of them, or the first and a packed one, small."""
    if not QUICK:
        yield from CALLS
    else:
        for call in (CALLS[0], CALLS[3]):
            yield replace(call, queries=64, keys=64, dtype="float32")


def attention() -> None:
    """The route that Tessera chooses, and XLA's blocks beside it."""
    device = Device.here()
    compare(calls(), lambda o, s: {fastest(o, s, device), "xla"})


def compare(
    found: Iterator[Call], routes: Callable[[Operands, Options], set[str]]
) -> None:
    """A row for each call and each of its routes that this device supports."""
    compiler = Compiler()
    work: list[tuple[Call, str, Any, jax.Array, Future[Any]]] = []
    for call in found:
        operands, gradient = call.drawn()
        settings = call.settings()
        for name in IMPLEMENTATIONS:
            if name not in routes(operands, settings):
                continue
            if reason := unsupported_reason(name, operands, settings, Device.here()):
                emit("attention_exact", case=call.name, route=name, refused=reason)
                continue
            program = compiler.submit(
                partial(_with_gradients, call, name), operands, gradient
            )
            work.append((call, name, operands, gradient, program))
    for call, name, operands, gradient, program in work:
        known = {"case": call.name, "width": call.width, "route": name}
        with errors_kept("attention_exact", **known):
            judge(known, call, operands, gradient, program.result())


def _with_gradients(call: Call, route: str, operands: Operands, gradient: Any) -> Any:
    """The result and the gradients; segments are arguments, lest XLA folds them."""

    def attend(*arrays: Any) -> Any:
        segments = operands.segments
        return op.flash_attention(
            *arrays, segment_ids=segments, implementation=route, **call.options
        )

    out, back = jax.vjp(attend, *operands[:3])
    return out, *back(gradient)


def judge(
    known: dict[str, Any], call: Call, operands: Operands, gradient: Any, program: Any
) -> None:
    """A row: errors, whether a second execution has the same bits, the kernel."""
    start = time.perf_counter()
    results, again = (
        [np.asarray(x, np.float32) for x in program(operands, gradient)]
        for _ in range(2)
    )
    norms = relative_errors(results, exact(operands, call.settings(), gradient), NAMES)
    same = [np.array_equal(a, b) for a, b in zip(results, again, strict=True)]
    emit(
        "attention_exact",
        **known,
        **norms,
        ok=max(norms.values()) < (2e-3 if call.dtype == "float32" else 2e-2),
        other_bits=[n for n, equal in zip(NAMES, same, strict=True) if not equal],
        cudnn="fmha" in program.as_text(),
        seconds=round(time.perf_counter() - start, 2),
    )


def others() -> None:
    """Other libraries' kernels, causal and with a window."""
    compiler = Compiler()
    work = []
    for width, window in ((64, None), (128, None), (256, None), (128, 200)):
        call = Call("", width, options={"causal": True, "window": window})
        operands, gradient = call.drawn()
        case = Case(4, 2, 512, width, True, window)
        for name, attend in other_kernels(case).items():

            def run(arrays: Any, gradient: Any, attend: Any = attend) -> Any:
                out, back = jax.vjp(attend, *arrays)
                return out, *back(gradient)

            program = compiler.submit(run, operands[:3], gradient)
            work.append((call, case.name, name, operands, gradient, program))
    for call, case_name, name, operands, gradient, program in work:
        with errors_kept("others_exact", case=case_name, route=name):
            results = program.result()(operands[:3], gradient)
            truth = exact(operands, call.settings(), gradient)
            norms = relative_errors(results, truth, NAMES)
            ok = max(norms.values()) < 2e-2
            emit("others_exact", case=case_name, route=name, **norms, ok=ok)
    if not work:
        emit("others_exact", skipped="no GPU, so none of them runs")
