# SPDX-License-Identifier: Apache-2.0
"""One call of attention, checked: its arrays, and what it asks for besides them.

Every implementation of ``flash_attention`` is given these two. Query i of a sequence
has the place ``i + offset``, and key j the place j. A query sees the keys of its own
segment; with ``causal`` those alone whose place is not after its own, and with a window
of w the last w of these. A query that sees no key reads zeros.
"""

from dataclasses import dataclass
from typing import NamedTuple

from jax import Array


class Operands(NamedTuple):
    """The arrays of a call: they vary from run to run.

    Attributes:
      q: ``[B, H, S, D]``.
      k: ``[B, G, T, D]``, G dividing H; query head h reads head ``h // (H / G)``.
      v: ``[B, G, T, D]``.
      query_segments: int32 ``[B, S]``, or None where all is one segment.
      key_segments: int32 ``[B, T]``, None where ``query_segments`` is.
      offset: int32 scalar that is added to ``Setting.offset``, or None.
      window: int32 scalar that stands for ``Setting.window``, or None.
    """

    q: Array
    k: Array
    v: Array
    query_segments: Array | None = None
    key_segments: Array | None = None
    offset: Array | None = None
    window: Array | None = None


@dataclass(frozen=True)
class Setting:
    """What is known of a call while it is traced, besides shapes and dtypes.

    Attributes:
      causal: Whether a query sees only keys that are not after it.
      scale: What scores are multiplied by.
      window: How many keys back a causal query sees, its own place included.
      soft_cap: Scaled scores s become ``soft_cap * tanh(s / soft_cap)``.
      offset: The place of the first query.
    """

    causal: bool
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    offset: int = 0
