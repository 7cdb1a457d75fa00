# SPDX-License-Identifier: Apache-2.0
import re

import jax
import jax.numpy as jnp
import pytest

from tessera.analysis import hlo
from tessera.analysis.dataflow import Dataflow
from tessera.analysis.hlo_walk import executions
from tessera.analysis.trip_counts import trip_count


def loop(*, start="0", step="add", by="1", direction="LT", limit="5", swap=False):
    """A counting loop as XLA prints one, its arithmetic inside fusions."""
    compared = "%limit, %i" if swap else "%i, %limit"
    return f"""HloModule m
%advance (p: s32[], q: s32[]) -> s32[] {{
  %p = s32[] parameter(0)
  %q = s32[] parameter(1)
  ROOT %next = s32[] {step}(%p, %q)
}}

%body (s: (s32[], f32[2])) -> (s32[], f32[2]) {{
  %s = (s32[], f32[2]{{0}}) parameter(0)
  %by = s32[] constant({by})
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[2]{{0}} get-tuple-element(%s), index=1
  %copied = s32[] copy(%i)
  %next = s32[] fusion(%copied, %by), kind=kLoop, calls=%advance
  ROOT %state = (s32[], f32[2]{{0}}) tuple(%next, %x)
}}

%compare (p: s32[], q: s32[]) -> pred[] {{
  %p = s32[] parameter(0)
  %q = s32[] parameter(1)
  ROOT %is = pred[] compare(%p, %q), direction={direction}
}}

%condition (s: (s32[], f32[2])) -> pred[] {{
  %s = (s32[], f32[2]{{0}}) parameter(0)
  %limit = s32[] constant({limit})
  %i = s32[] get-tuple-element(%s), index=0
  ROOT %is = pred[] fusion({compared}), kind=kLoop, calls=%compare
}}

ENTRY %main (x: f32[2], n: s32[]) -> (s32[], f32[2]) {{
  %x = f32[2]{{0}} parameter(0)
  %n = s32[] parameter(1)
  %start = s32[] {"copy(%n)" if start == "n" else f"constant({start})"}
  %state = (s32[], f32[2]{{0}}) tuple(%start, %x)
  ROOT %loop = (s32[], f32[2]{{0}}) while(%state), condition=%condition, body=%body
}}"""


def count(text):
    module = hlo.parse(text)
    (loop,) = [e for e in executions(module) if e.instruction.opcode == "while"]
    return trip_count(Dataflow(module), loop)


def test_a_recorded_count_is_used():
    count_of_7 = '"known_trip_count":{"n":"7"}'
    text = loop().replace(
        "body=%body", f'body=%body, backend_config={{"a":1,{count_of_7}}}'
    )
    assert count(text) == 7


@pytest.mark.parametrize(
    ("form", "trips"),
    [
        ({}, 5),
        ({"start": "2"}, 3),
        ({"by": "2"}, 3),
        ({"direction": "LE"}, 6),
        ({"direction": "NE"}, 5),
        ({"start": "5"}, 0),
        ({"start": "9"}, 0),
        ({"start": "4", "limit": "0", "step": "subtract", "direction": "GT"}, 4),
        ({"start": "4", "limit": "0", "step": "subtract", "direction": "GE"}, 5),
        ({"start": "4", "limit": "-1", "by": "-2", "direction": "GT"}, 3),
        ({"direction": "GT", "swap": True}, 5),
    ],
)
def test_a_count_follows_from_start_step_and_limit(form, trips):
    assert count(loop(**form)) == trips


@pytest.mark.parametrize(
    "form",
    [
        {"start": "n"},
        {"by": "0"},
        {"by": "-1"},
        {"by": "2", "direction": "NE"},
        {"direction": "EQ"},
        {"step": "multiply"},
    ],
)
def test_a_count_that_depends_on_values_is_unknown(form):
    assert count(loop(**form)) is None


def test_a_scan_is_counted_with_xlas_record_and_without():
    def scanned(x):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c), None), x, None, length=6)[0]

    text = jax.jit(scanned).lower(jnp.ones((4, 4))).compile().as_text()
    without = re.sub(r'"known_trip_count":\{[^}]*\}', '"removed":0', text)
    assert "known_trip_count" not in without
    assert count(without) == count(text) == 6


def test_a_loop_until_a_value_is_reached_is_unknown():
    def doubled(x):
        return jax.lax.while_loop(lambda y: y.sum() < 9.0, lambda y: y * 2.0, x)

    assert count(jax.jit(doubled).lower(jnp.ones(3)).compile().as_text()) is None
