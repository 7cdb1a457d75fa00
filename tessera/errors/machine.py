# SPDX-License-Identifier: Apache-2.0
"""Errors T7xx: the machine."""

from tessera.errors.base import TesseraError


class BackendStartedError(TesseraError, ValueError):
    """Devices cannot be simulated any more: JAX has started its backend."""

    code = "T701"


class DeviceCountError(TesseraError, ValueError):
    """The mesh asks for devices that this machine does not have."""

    code = "T702"


class HostMemoryError(TesseraError, ValueError):
    """Arrays are to lie in the memory of the host, which the devices cannot reach."""

    code = "T703"


class ProcessLayoutError(TesseraError, ValueError):
    """What says which process this is of how many is incomplete, or contradictory."""

    code = "T704"


class CoordinatorError(TesseraError, ValueError):
    """The address where ranks meet cannot be used: unknown, busy or another's."""

    code = "T705"
    exit_code = 76


class MissingRanksError(TesseraError, ValueError):
    """Ranks are missing where the ranks of a run meet, or several say the same one."""

    code = "T706"
    exit_code = 76


class RanksDifferError(TesseraError, ValueError):
    """The ranks are not of one run: settings, versions, code or devices differ."""

    code = "T707"
    exit_code = 76


class StalledError(TesseraError, ValueError):
    """A phase of the run took longer than its deadline."""

    code = "T708"
    exit_code = 124


class CompileCacheError(TesseraError, ValueError):
    """The folder of compiled programs, which are code, is not the user's alone."""

    code = "T709"


class FolderInUseError(TesseraError, ValueError):
    """Another run writes to the folder of this one."""

    code = "T710"
