# SPDX-License-Identifier: Apache-2.0
"""Errors T1xx: meshes."""

from tessera.errors.base import TesseraError

# The fix in messages about Explicit axes, which are the default of jax.make_mesh.
AUTO_AXES = (
    "make the mesh with Auto axes: dist.Mesh(axes, devices), or "
    "jax.make_mesh(shape, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))"
)


class MeshShapeError(TesseraError, ValueError):
    """Axes, device nesting and shape do not describe one grid."""

    code = "T101"


class DuplicateAxisError(TesseraError, ValueError):
    """A mesh names one axis twice, or gives an axis no proper name."""

    code = "T102"


class UnknownAxisError(TesseraError, ValueError):
    """The mesh does not have an axis of this name."""

    code = "T103"


class DeviceIdError(TesseraError, ValueError):
    """Device ids of a mesh are repeated or illegal."""

    code = "T104"


class AbstractMeshError(TesseraError, ValueError):
    """A mesh needs devices that this machine does not have in order to run."""

    code = "T105"


class NoMeshError(TesseraError, ValueError):
    """An operation needs a mesh, and no mesh is open."""

    code = "T106"
