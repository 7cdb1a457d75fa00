# SPDX-License-Identifier: Apache-2.0
"""Errors T7xx: the machine."""

from tessera.errors.base import TesseraError


class BackendStartedError(TesseraError, ValueError):
    """Devices cannot be simulated because JAX has already started its backend."""

    code = "T701"


class DeviceCountError(TesseraError, ValueError):
    """The mesh asks for devices that this machine does not have."""

    code = "T702"


class HostMemoryError(TesseraError, ValueError):
    """Arrays cannot be placed in host memory, which the devices cannot access."""

    code = "T703"


class ProcessLayoutError(TesseraError, ValueError):
    """The rank and number of processes are incomplete, or contradictory."""

    code = "T704"


class CoordinatorError(TesseraError, ValueError):
    """The rendezvous address cannot be used: unknown, busy or taken."""

    code = "T705"
    exit_code = 76


class MissingRanksError(TesseraError, ValueError):
    """Ranks are missing at the rendezvous, or several have the same number."""

    code = "T706"
    exit_code = 76


class RanksDifferError(TesseraError, ValueError):
    """Ranks differ in settings, versions, code, devices, or arguments of a step."""

    code = "T707"
    exit_code = 76


class StalledError(TesseraError, ValueError):
    """A phase of the run took longer than its deadline."""

    code = "T708"
    exit_code = 124


class CompileCacheError(TesseraError, ValueError):
    """Other users can write to the folder of compiled programs, which are code."""

    code = "T709"


class FolderInUseError(TesseraError, ValueError):
    """Another run writes to the folder of this one."""

    code = "T710"


class TargetError(TesseraError, ValueError):
    """A target is unknown, or there is no such size of it."""

    code = "T711"


class TargetCompilerError(TesseraError, ValueError):
    """The compiler of a target is not installed, or does not start."""

    code = "T712"


class NoTargetError(TesseraError, ValueError):
    """A prediction is asked of a mesh without a target."""

    code = "T713"


class PlanError(TesseraError, ValueError):
    """No layout of a run is legal on a target, or none fits its memory."""

    code = "T714"


class LostRankError(TesseraError, ValueError):
    """Another rank died, and this one ends with it."""

    code = "T715"
    exit_code = 143


class WrongValuesError(TesseraError, ValueError):
    """A device computes wrong values: a step cannot be repeated on other devices."""

    code = "T716"
    exit_code = 74


class HubError(TesseraError, ValueError):
    """The Hugging Face Hub does not give, or take, what a name says."""

    code = "T719"


class RewardError(TesseraError, ValueError):
    """A reward cannot be used: its name, module, signature or settings."""

    code = "T720"


class ServerError(TesseraError, ValueError):
    """A server that completes prompts cannot be reached, or answers something else."""

    code = "T721"
