# SPDX-License-Identifier: Apache-2.0
"""Errors T4xx: operations and models."""

from tessera.errors.base import TesseraError


class OperandError(TesseraError, ValueError):
    """The operands of an operation do not fit each other."""

    code = "T401"


class HeadCountError(TesseraError, ValueError):
    """The mesh axis does not divide the attention heads."""

    code = "T402"


class UnknownModelError(TesseraError, ValueError):
    """The registry has no model of this name."""

    code = "T403"


class LogicalAxisError(TesseraError, ValueError):
    """A logical axis name is not in the rule table."""

    code = "T404"


class ModelShapeError(TesseraError, ValueError):
    """The sizes of a model's configuration contradict each other."""

    code = "T405"


class ImplementationError(TesseraError, ValueError):
    """The requested implementation of an operation does not support the call."""

    code = "T406"


class ModelDefinitionError(TesseraError, ValueError):
    """A registered model is not of the form that the trainer needs."""

    code = "T407"


class DimTableError(TesseraError, ValueError):
    """A table of logical dims does not describe a model's parameters."""

    code = "T408"
