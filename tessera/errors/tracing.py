# SPDX-License-Identifier: Apache-2.0
"""Errors T3xx: tracing and pipelines."""

from tessera.errors.base import TesseraError


class ArgumentError(TesseraError, TypeError):
    """An argument can be neither traced nor static."""

    code = "T301"


class OutsideTraceError(TesseraError, ValueError):
    """Something that only works inside a traced function was called outside."""

    code = "T302"


class UnconnectedGradientError(TesseraError, ValueError):
    """A loss does not depend on the values that it is differentiated by."""

    code = "T303"


class LossFormError(TesseraError, ValueError):
    """A loss is not a floating-point scalar."""

    code = "T304"


class ParameterNameError(TesseraError, ValueError):
    """Two parameters of one step share a name, or a name is not legal."""

    code = "T305"


class ParameterTreeError(TesseraError, ValueError):
    """The parameters given to a step are not the ones it declares."""

    code = "T306"


class UnknownPassError(TesseraError, ValueError):
    """There is no compiler pass of this name."""

    code = "T307"


class MeshConflictError(TesseraError, ValueError):
    """The inputs of one step live on different meshes."""

    code = "T308"


class ScheduleError(TesseraError, ValueError):
    """A pipeline schedule is a table that cannot be executed."""

    code = "T309"


class UnknownScheduleError(TesseraError, ValueError):
    """There is no pipeline schedule of this name."""

    code = "T310"


class PipelineSizeError(TesseraError, ValueError):
    """Stages, microbatches, chunks and layers of a pipeline are incompatible."""

    code = "T311"


class PipelineFormError(TesseraError, ValueError):
    """A function or its loss cannot be run as the stages of a pipeline."""

    code = "T312"


class StrategyError(TesseraError, ValueError):
    """A strategy does not exist, or does not apply to the function."""

    code = "T313"


class StageCollectiveError(TesseraError, ValueError):
    """A pipeline stage has a collective with devices that do not run it."""

    code = "T314"


class AnnotationError(TesseraError, TypeError):
    """Arrays do not fit the annotations of a function, or one is not well formed."""

    code = "T315"


class UndifferentiableError(TesseraError, ValueError):
    """An operation in the path of a gradient has no backward pass."""

    code = "T317"


class BranchError(TesseraError, TypeError):
    """Two branches assign values of different types to one variable."""

    code = "T318"


class ControlFlowError(TesseraError, TypeError):
    """Python control flow depends on a value that is only known at run time."""

    code = "T319"


class WriteBackError(TesseraError, ValueError):
    """An argument was modified in a way that cannot be written back."""

    code = "T320"


class UndecidedRoleError(TesseraError, ValueError):
    """Nothing decides whether an argument is data, a weight or optimizer state."""

    code = "T324"
