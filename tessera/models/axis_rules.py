# SPDX-License-Identifier: Apache-2.0
"""Which mesh axes may split each logical dim: one table for every model.

Parameters and activations name their dims by what they are (``heads``, ``mlp``,
``vocab``). Together the rows are Megatron's layout (arXiv 1909.08053) inside fully
sharded data parallelism (arXiv 1910.02054): the first matmul of a block half is split
by columns over ``tp`` and the second by rows, so each half ends in one all-reduce.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

RULES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        # Outside of the experts, their axes split data as dp does.
        "batch": ("dp", "fsdp", "ep_outer", "ep"),
        # The tokens of a sequence, which attention alone mixes.
        "context": ("cp",),
        # Under sequence parallelism: of the residuals, between the tp regions.
        "sequence": ("cp", "tp"),
        "vocab": ("tp",),
        "embed": ("fsdp",),
        # The width of the embedding table, which the first and the last stage of a
        # pipeline read: stored in parts by all, put together once in a step.
        "table": ("fsdp", "pp"),
        "heads": ("tp",),
        "kv_heads": ("tp",),
        "mlp": ("tp",),
        # With both, tokens travel in two hops: inside ep, then across ep_outer.
        "experts": ("ep_outer", "ep"),
        "router": (),
        "head_dim": (),
        "layers": (),
        "stages": ("pp",),
        # A few thousandths of a model at most: gathering would cost more than it saves.
        "norm": (),
    }
)
