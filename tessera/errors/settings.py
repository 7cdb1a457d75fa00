# SPDX-License-Identifier: Apache-2.0
"""Errors T5xx: configuration."""

from tessera.errors.base import TesseraError


class UnknownSettingError(TesseraError, ValueError):
    """A configuration key does not exist."""

    code = "T501"


class SettingValueError(TesseraError, ValueError):
    """A configuration value is not legal for the setting."""

    code = "T502"


class BatchSizeError(TesseraError, ValueError):
    """A batch cannot be divided over devices, microbatches or accumulation steps."""

    code = "T503"


class OutputPathError(TesseraError, ValueError):
    """The output folder cannot be written, or was moved."""

    code = "T504"


class UnknownOptimizerError(TesseraError, ValueError):
    """The registry has no optimizer or schedule of this name."""

    code = "T505"


class LossScaleError(TesseraError, ValueError):
    """fp16 gradients overflow however small the loss is scaled."""

    code = "T506"


class SettingConflictError(TesseraError, ValueError):
    """Two settings exclude each other."""

    code = "T507"


class NonFiniteError(TesseraError, ValueError):
    """The loss or the gradients were not finite for too many steps in a row."""

    code = "T508"


class DeviceMemoryError(TesseraError, ValueError):
    """The state of a run is larger than the memory of its devices."""

    code = "T509"


class SpikeError(TesseraError, ValueError):
    """The loss or the gradients have too many spikes in a row."""

    code = "T510"


class MissingLibraryError(TesseraError, ValueError):
    """A library is not installed that only some commands and settings need."""

    code = "T511"
