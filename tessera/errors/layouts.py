# SPDX-License-Identifier: Apache-2.0
"""Errors T2xx: shards and layouts."""

from tessera.errors.base import TesseraError


class ShardDivisibilityError(TesseraError, ValueError):
    """A dim is not a multiple of the size of the mesh axes that shard it."""

    code = "T201"


class AxisReusedError(TesseraError, ValueError):
    """One mesh axis would shard two dims of the same array."""

    code = "T202"


class DimError(TesseraError, ValueError):
    """A spec names a dim that the array does not have."""

    code = "T203"


class SpecFormError(TesseraError, ValueError):
    """A ShardSpec is malformed, independent of the array."""

    code = "T204"


class LayoutMismatchError(TesseraError, ValueError):
    """The layout that was compiled, or given, is not the declared one."""

    code = "T205"


class CollectiveError(TesseraError, ValueError):
    """A collective cannot act on this array over this axis."""

    code = "T206"


class TensorFormError(TesseraError, ValueError):
    """A tensor is declared with a dtype, shape or initializer that does not exist."""

    code = "T207"


class KernelError(TesseraError, ValueError):
    """A kernel's argument or result cannot be laid out over the mesh."""

    code = "T208"


class MeshAttributeError(TesseraError, AttributeError):
    """A mesh is asked for what only one of JAX has."""

    code = "T209"


class RandomNumbersError(TesseraError, ValueError):
    """Devices or microbatches with different rows draw the same random numbers."""

    code = "T211"
