# SPDX-License-Identifier: Apache-2.0
"""Tessera: write a step for one device, declare a mesh, run it on any.

``import tessera as ts``, then ``from tessera import dist, graph, op``.
"""

from tessera import amp as amp
from tessera import dist as dist
from tessera import graph as graph
from tessera import mesh as mesh
from tessera import nn as nn
from tessera import ops as op
from tessera.annotations import Tensor as Tensor
from tessera.arrays import *  # noqa: F403
from tessera.arrays import __all__ as _arrays
from tessera.dtypes import *  # noqa: F403
from tessera.dtypes import __all__ as _dtypes
from tessera.errors import TesseraError as TesseraError
from tessera.errors import TesseraWarning as TesseraWarning
from tessera.graph import schedule as schedule
from tessera.graph.comparison import compare_layouts as compare_layouts
from tessera.graph.distribute import distribute as distribute
from tessera.graph.function import function as function
from tessera.graph.function import function as jit
from tessera.graph.tracing.gradient import grad as grad
from tessera.graph.value_and_grad import value_and_grad as value_and_grad
from tessera.mesh import Mesh as Mesh
from tessera.ops.accumulation import accumulate_gradients as accumulate_gradients
from tessera.ops.attention.pallas.tuning import tune_attention as tune_attention
from tessera.ops.checkpointing import checkpoint as checkpoint
from tessera.ops.clipping import clip_by_global_norm as clip_by_global_norm
from tessera.ops.clipping import clip_by_value as clip_by_value
from tessera.ops.clipping import global_norm as global_norm
from tessera.scope import autocast as autocast
from tessera.shard import DistTensor as DistTensor
from tessera.shard import ShardSpec as ShardSpec
from tessera.training.checkpoints.plan import resume_plan as resume_plan

distributed = dist

__all__ = [
    "DistTensor",
    "Mesh",
    "ShardSpec",
    "Tensor",
    "TesseraError",
    "TesseraWarning",
    "accumulate_gradients",
    "amp",
    "autocast",
    "checkpoint",
    "clip_by_global_norm",
    "clip_by_value",
    "compare_layouts",
    "dist",
    "distribute",
    "distributed",
    "function",
    "global_norm",
    "grad",
    "graph",
    "jit",
    "mesh",
    "nn",
    "op",
    "resume_plan",
    "schedule",
    "tune_attention",
    "value_and_grad",
    *_arrays,
    *_dtypes,
]
