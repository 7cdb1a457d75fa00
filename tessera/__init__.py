# SPDX-License-Identifier: Apache-2.0
"""Tessera: write a step for one device, declare a mesh, run it on any.

``import tessera as ts``, then ``from tessera import dist, graph, op``.
"""

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
from tessera.scope import autocast as autocast
from tessera.shard import DistTensor as DistTensor
from tessera.shard import ShardSpec as ShardSpec

distributed = dist

__all__ = [
    "DistTensor",
    "Mesh",
    "ShardSpec",
    "Tensor",
    "TesseraError",
    "TesseraWarning",
    "autocast",
    "compare_layouts",
    "dist",
    "distribute",
    "distributed",
    "function",
    "grad",
    "graph",
    "jit",
    "mesh",
    "nn",
    "op",
    "schedule",
    "value_and_grad",
    *_arrays,
    *_dtypes,
]
