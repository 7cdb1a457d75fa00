# SPDX-License-Identifier: Apache-2.0
"""The table of mesh axes that may shard each logical dim, for every model.

The dims of parameters and activations have logical names (``heads``, ``mlp``,
``vocab``). Together the rows are Megatron's layout (arXiv 1909.08053) inside fully
sharded data parallelism (arXiv 1910.02054): the first matmul of a block half is split
by columns over ``tp`` and the second by rows, so each half ends in one all-reduce.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

RULES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        # Outside of the experts, their axes shard the data as dp does.
        "batch": ("dp", "fsdp", "ep_outer", "ep"),
        # The tokens of a sequence, which only attention mixes.
        "context": ("cp",),
        # Under sequence parallelism: the residual stream, between tp regions.
        "sequence": ("cp", "tp"),
        "vocab": ("tp",),
        "embed": ("fsdp",),
        # The width of the embedding table, which the first and last pipeline stages
        # use: all stages store a shard of it, gathered once a step.
        "table": ("fsdp", "pp"),
        # Where tp does not divide the vocabulary, it splits the width of what is stored
        # (wide_table). A step pads the table to such words, without words to columns.
        "wide_table": ("fsdp", "tp"),
        "words": ("tp",),
        "columns": ("fsdp", "pp"),
        "heads": ("tp",),
        "kv_heads": ("tp",),
        "mlp": ("tp",),
        # With both, tokens are exchanged in two hops: within ep, then across ep_outer.
        "experts": ("ep_outer", "ep"),
        "router": (),
        "head_dim": (),
        "layers": (),
        "lora_rank": (),
        "stages": ("pp",),
        # At most a few thousandths of a model: gathering costs more than it saves.
        "norm": (),
    }
)
