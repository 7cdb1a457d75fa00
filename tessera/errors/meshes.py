# SPDX-License-Identifier: Apache-2.0
"""Errors T1xx: meshes."""

from tessera.errors.base import TesseraError


class MeshShapeError(TesseraError, ValueError):
    """Axes, device nesting and shape do not describe one grid."""

    code = "T101"


class DuplicateAxisError(TesseraError, ValueError):
    """A mesh names one axis twice, or gives an axis no proper name."""

    code = "T102"


class UnknownAxisError(TesseraError, ValueError):
    """A mesh axis is named that the mesh does not have."""

    code = "T103"


class DeviceIdError(TesseraError, ValueError):
    """Device ids of a mesh are repeated or not to be had."""

    code = "T104"


class AbstractMeshError(TesseraError, ValueError):
    """A mesh of devices that this machine lacks was asked to run something."""

    code = "T105"


class NoMeshError(TesseraError, ValueError):
    """An operation needs a mesh and none is in sight."""

    code = "T106"
