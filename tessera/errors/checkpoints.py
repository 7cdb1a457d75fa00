# SPDX-License-Identifier: Apache-2.0
"""Errors T8xx: checkpoints."""

from tessera.errors.base import TesseraError


class CheckpointNotFoundError(TesseraError, ValueError):
    """There is no checkpoint to resume from, or none that is intact."""

    code = "T801"


class CheckpointMismatchError(TesseraError, ValueError):
    """A checkpoint has other arrays than the run, or another format."""

    code = "T802"


class DataChangedError(TesseraError, ValueError):
    """The data or its order is not what the checkpoint's run was reading."""

    code = "T803"


class CheckpointWriteError(TesseraError, ValueError):
    """A checkpoint cannot be written."""

    code = "T804"


class WeightFileError(TesseraError, ValueError):
    """A file of weights is malformed, or lacks the parameters of this model."""

    code = "T805"


class ModelFolderError(TesseraError, ValueError):
    """A ``config.json`` of a folder of weights cannot be used, or written."""

    code = "T806"


class StateLeafError(TesseraError, ValueError):
    """A leaf of a state cannot be stored in a checkpoint."""

    code = "T807"
