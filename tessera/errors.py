# SPDX-License-Identifier: Apache-2.0
"""Every mistake a user can make, as a class with a stable code.

A message says what is wrong, what was got (with the arithmetic), and what to do.
The first digit of a code says what it is about, as the sections below do. ``assert`` is
for Tessera's own bugs.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import ClassVar


class TesseraError(Exception):
    """A mistake that its author can mend; the base of every coded error.

    Args:
      what: One sentence: which argument, and what is wrong with it.
      got: The values met, with the arithmetic that fails.
      fix: What to write instead, with the nearest legal values.

    Example:
      >>> raise NoMeshError("there is no mesh here", fix="open one with 'with mesh:'")
      Traceback (most recent call last):
      ...
      tessera.errors.NoMeshError: [T106] there is no mesh here
        fix: open one with 'with mesh:'
        docs: docs/errors/T106.md
    """

    code: ClassVar[str] = "T000"
    exit_code: ClassVar[int] = 2
    """What a program that it ends exits with; docs/reliability.md has them all."""

    def __init__(self, what: str, *, got: str = "", fix: str = "") -> None:
        self.what, self.got, self.fix = what, got, fix
        lines = [f"[{self.code}] {what}"]
        lines += [f"  got: {line}" for line in got.splitlines()]
        lines += [f"  fix: {line}" for line in fix.splitlines()]
        lines += [f"  docs: docs/errors/{self.code}.md"]
        # The name of a file may hold what is no character, and cannot be written.
        super().__init__("\n".join(lines).encode(errors="backslashreplace").decode())


class TesseraWarning(UserWarning):
    """Something legal that its author probably did not want."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint that ends a ``fix`` line: ``did you mean 'fsdp'? Known: 'fsdp', 'tp'``."""
    known = list(known)
    close = get_close_matches(name, known, n=1)
    listed = ", ".join(repr(item) for item in known) or "none"
    return (f"did you mean {close[0]!r}? " if close else "") + f"Known: {listed}"


# --- T1xx: meshes


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


# --- T2xx: shards and layouts


class ShardDivisibilityError(TesseraError, ValueError):
    """A dim is not a multiple of the mesh axes that it is split over."""

    code = "T201"


class AxisReusedError(TesseraError, ValueError):
    """One mesh axis is asked to split two dims of the same array."""

    code = "T202"


class DimError(TesseraError, ValueError):
    """A spec names a dim that the array does not have."""

    code = "T203"


class SpecFormError(TesseraError, ValueError):
    """A ShardSpec is not well formed by itself, whatever the array."""

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


class BudgetError(TesseraError, ValueError):
    """A program sends more between its devices than its budget allows."""

    code = "T209"


class BudgetFormError(TesseraError, ValueError):
    """A budget of collectives is not a size, or is for an axis that does not exist."""

    code = "T210"


# --- T3xx: tracing and pipelines


class ArgumentError(TesseraError, TypeError):
    """An argument can be neither traced nor held static."""

    code = "T301"


class OutsideTraceError(TesseraError, ValueError):
    """Something that only has a meaning inside a traced function was called outside."""

    code = "T302"


class UnconnectedGradientError(TesseraError, ValueError):
    """A loss does not depend on what it is differentiated by."""

    code = "T303"


class LossFormError(TesseraError, ValueError):
    """A loss is not one floating-point number."""

    code = "T304"


class ParameterNameError(TesseraError, ValueError):
    """Two parameters of one step share a name, or a name is not legal."""

    code = "T305"


class ParameterTreeError(TesseraError, ValueError):
    """The parameters given to a step are not the ones it declares."""

    code = "T306"


class UnknownPassError(TesseraError, ValueError):
    """A pass is named that the pipeline does not have."""

    code = "T307"


class MeshConflictError(TesseraError, ValueError):
    """The inputs of one step live on different meshes."""

    code = "T308"


class ScheduleError(TesseraError, ValueError):
    """A pipeline schedule is a table that cannot be executed."""

    code = "T309"


class UnknownScheduleError(TesseraError, ValueError):
    """A pipeline schedule is named that does not exist."""

    code = "T310"


class PipelineSizeError(TesseraError, ValueError):
    """Stages, microbatches, chunks and layers of a pipeline do not fit each other."""

    code = "T311"


class PipelineFormError(TesseraError, ValueError):
    """A function or its loss cannot be run as the stages of a pipeline."""

    code = "T312"


class StrategyError(TesseraError, ValueError):
    """A strategy does not exist, or the function has not what it is about."""

    code = "T313"


class StageCollectiveError(TesseraError, ValueError):
    """A stage of a pipeline makes devices wait that do not run it."""

    code = "T314"


class AnnotationError(TesseraError, TypeError):
    """Arrays do not fit the annotations of a function, or one is not well formed."""

    code = "T315"


class UndifferentiableError(TesseraError, ValueError):
    """A gradient would have to go through an operation that has no backward pass."""

    code = "T317"


class BranchError(TesseraError, TypeError):
    """Two ways through a function leave values of different types in one place."""

    code = "T318"


class ControlFlowError(TesseraError, TypeError):
    """Python has to decide something that is only known when the program runs."""

    code = "T319"


class WriteBackError(TesseraError, ValueError):
    """An argument was changed in a way that cannot be given back to the caller."""

    code = "T320"


class UndecidedRoleError(TesseraError, ValueError):
    """Nothing decides whether an argument is data, a weight or optimizer state."""

    code = "T324"


# --- T4xx: operations and models


class OperandError(TesseraError, ValueError):
    """The operands of an operation do not fit each other."""

    code = "T401"


class HeadCountError(TesseraError, ValueError):
    """Attention heads cannot be divided over the mesh axis that holds them."""

    code = "T402"


class UnknownModelError(TesseraError, ValueError):
    """A model is named that the registry does not have."""

    code = "T403"


class LogicalAxisError(TesseraError, ValueError):
    """A logical axis name is not in the rule table."""

    code = "T404"


class ModelShapeError(TesseraError, ValueError):
    """The sizes of a model's configuration contradict each other."""

    code = "T405"


class ImplementationError(TesseraError, ValueError):
    """An implementation of an operation is asked for that cannot serve the call."""

    code = "T406"


# --- T5xx: configuration


class UnknownSettingError(TesseraError, ValueError):
    """A configuration key does not exist."""

    code = "T501"


class SettingValueError(TesseraError, ValueError):
    """A configuration value is not one that the setting takes."""

    code = "T502"


class BatchSizeError(TesseraError, ValueError):
    """A batch cannot be divided over devices, microbatches or accumulation steps."""

    code = "T503"


class OutputPathError(TesseraError, ValueError):
    """The output folder cannot be written or leaves its place."""

    code = "T504"


class UnknownOptimizerError(TesseraError, ValueError):
    """An optimizer or schedule is named that the registry does not have."""

    code = "T505"


class LossScaleError(TesseraError, ValueError):
    """fp16 gradients overflow however small the loss is scaled."""

    code = "T506"


class SettingConflictError(TesseraError, ValueError):
    """Two settings ask for things that exclude each other."""

    code = "T507"


class NonFiniteError(TesseraError, ValueError):
    """The loss or the gradients were not finite for too many steps in a row."""

    code = "T508"


class DeviceMemoryError(TesseraError, ValueError):
    """What a run keeps between its steps is larger than the memory of its devices."""

    code = "T509"


# --- T6xx: data


class DataNotFoundError(TesseraError, ValueError):
    """A data path does not exist or cannot be read."""

    code = "T601"


class EmptyDataError(TesseraError, ValueError):
    """There is no text in the data, or not enough for one batch."""

    code = "T602"


class VocabularyError(TesseraError, ValueError):
    """The tokenizer's vocabulary is larger than the model's."""

    code = "T603"


class TokenRangeError(TesseraError, ValueError):
    """A token id lies outside the model's vocabulary."""

    code = "T604"


class TokenizerError(TesseraError, ValueError):
    """A tokenizer is named that does not exist or cannot be read."""

    code = "T605"


class DataFormatError(TesseraError, ValueError):
    """A data file is of a kind that is not read as text."""

    code = "T606"


class JsonLinesError(TesseraError, ValueError):
    """A line of JSON Lines is no object with a text in the field that is asked for."""

    code = "T607"


# --- T7xx: the machine


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


# --- T8xx: checkpoints


class CheckpointNotFoundError(TesseraError, ValueError):
    """There is no checkpoint to resume from, or none that is intact."""

    code = "T801"


class CheckpointMismatchError(TesseraError, ValueError):
    """A checkpoint holds other arrays than the run, or is of another form."""

    code = "T802"


class DataChangedError(TesseraError, ValueError):
    """The data or its order is not what the checkpoint's run was reading."""

    code = "T803"


class CheckpointWriteError(TesseraError, ValueError):
    """A checkpoint cannot be written."""

    code = "T804"


class WeightFileError(TesseraError, ValueError):
    """A file of weights is malformed, or holds no parameters of this model."""

    code = "T805"
