# SPDX-License-Identifier: Apache-2.0
"""Which dims of a decoder cannot be sharded on a mesh, by its sizes."""

import math
from dataclasses import replace

from tessera.errors import HeadCountError, nearest
from tessera.mesh import Mesh
from tessera.ops.attention.context_parallel import check_exchange
from tessera.ops.attention.context_parallel_variants import Method
from tessera.train.models.decoder.config import DecoderConfig
from tessera.train.models.partition_rules import Placement


def decoder_placement(
    config: DecoderConfig,
    mesh: Mesh | None,
    *,
    sequence_parallel: bool = False,
    context_parallel: Method = "ring",
) -> Placement:
    """The placement of a decoder of these sizes on a mesh.

    With fewer key/value heads than ``tp``, each device keeps them all. If ``pp``
    does not divide the width, each stage keeps the whole embedding table. If ``tp``
    does not divide the vocabulary, it splits the width of the tables instead, but not
    with ``pp``.

    Raises:
      HeadCountError: [T402] the heads cannot be divided over ``tp``, or over
        ``cp`` by all-to-all attention.
    """
    whole = frozenset[str]() if sequence_parallel else frozenset({"sequence"})
    place = Placement(mesh, whole, context_parallel=context_parallel)
    tp, cp = place.size("heads"), place.size("context")
    _check_heads(config, tp)
    if context_parallel == "all_to_all" and cp > 1:
        kv_heads = max(config.num_kv_heads // tp, 1)
        check_exchange(config.num_heads // tp, kv_heads, cp, "cp")
    if config.num_kv_heads % tp:
        whole |= {"kv_heads"}
    if config.d_model % place.size("table"):
        whole |= {"table", "columns"}
    if config.vocab_size % place.size("vocab"):
        whole |= {"vocab"}
        # The stages of a pipeline scatter the gradient of a whole width.
        is_staged = mesh is not None and "pp" in mesh.axes
        if is_staged or config.d_model % place.size("wide_table"):
            whole |= {"wide_table"}
    return replace(place, whole=whole)


def _fits_tp(kv_heads: int, tp: int) -> bool:
    """Whether key/value heads can be divided over tp, or replicated along it."""
    return kv_heads % tp == 0 or tp % kv_heads == 0


def _check_heads(config: DecoderConfig, tp: int) -> None:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % tp == 0 and _fits_tp(kv_heads, tp):
        return
    sizes = f"num_heads = {heads}, num_kv_heads = {kv_heads}, axis size {tp}"
    legal = [n for n in range(1, heads + 1) if heads % n == 0 and _fits_tp(kv_heads, n)]
    fix = f"use tp {nearest(legal, tp)}"
    if heads % tp:
        if _fits_tp(kv_heads, tp):
            step = math.lcm(tp, kv_heads)
            counts = range(step, heads + 2 * step, step)
            fix += f", or num_heads {nearest(counts, heads)}"
        raise HeadCountError(
            f"{heads} attention heads cannot be divided over mesh axis 'tp'",
            got=f"{sizes}, remainder {heads % tp}",
            fix=fix,
        )
    counts = [n for n in range(1, heads + 1) if heads % n == 0 and _fits_tp(n, tp)]
    raise HeadCountError(
        f"{kv_heads} key/value heads can be neither divided over mesh axis 'tp' "
        "nor copied along it",
        got=f"{sizes}: neither of {kv_heads} and {tp} divides the other",
        fix=f"use tp {nearest(legal, tp)}, or num_kv_heads {nearest(counts, kv_heads)}",
    )
