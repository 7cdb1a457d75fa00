# SPDX-License-Identifier: Apache-2.0
"""What is found in a traced loss: matmuls by parameters, rows of them, and totals."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Weight:
    """A value that is a parameter, or the part of one that a layer has.

    Attributes:
      path: The parameter's name in the tree.
      names: The logical name of each dim, None where it has none.
    """

    path: str
    names: tuple[str | None, ...]


@dataclass(frozen=True)
class Product:
    """A matmul with a parameter, in the forward pass of one sequence.

    Attributes:
      path: The parameter's name in the tree.
      times: How often it runs, which is once for each layer.
      rows: Vectors that are multiplied: tokens, or those of all chosen experts.
      inner: Size of what is summed over.
      outer: Size of the results of each vector.
      inner_names: Logical names of the parameter's dims that are summed over.
      outer_names: Of those that are kept.
      source: The same for products that share an input.
      itemsize: Bytes of one number of the result.
      groups: Matrices of which each multiplies rows of its own, as those of experts.
    """

    path: str
    times: float
    rows: float
    inner: int
    outer: int
    inner_names: tuple[str | None, ...]
    outer_names: tuple[str | None, ...]
    source: int
    itemsize: int
    groups: int = 1

    @property
    def flops(self) -> float:
        """Of all repetitions, for one sequence."""
        return 2.0 * self.times * self.rows * self.inner * self.outer


@dataclass(frozen=True)
class Lookup:
    """Rows of a parameter that are chosen by tokens.

    Attributes:
      path: The parameter's name in the tree.
      names: The logical name of each of its dims.
      nbytes: Of the rows of one sequence.
    """

    path: str
    names: tuple[str | None, ...]
    nbytes: int


@dataclass
class TracedCosts:
    """What a traced program multiplies and moves.

    Attributes:
      products: Matmuls with a parameter.
      lookups: Rows of parameters.
      inner_flops: FLOPs of other matmuls.
      inner_bytes: What they read and write outside of kernels that keep it inside.
      total_flops: FLOPs of all matmuls.
      reduced_bytes: What reductions read, such as those of norms.
      other_flops: Operations beside matmuls, one for each number.
      stacked_bytes: Results of the steps of outermost scans, such as what the layers of
        a forward pass keep for the backward pass.
      operations: Matmuls, reductions, slices and steps of scans: a count of what
        starts.
    """

    products: list[Product] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    inner_flops: float = 0.0
    inner_bytes: float = 0.0
    total_flops: float = 0.0
    reduced_bytes: float = 0.0
    other_flops: float = 0.0
    stacked_bytes: float = 0.0
    operations: float = 0.0
