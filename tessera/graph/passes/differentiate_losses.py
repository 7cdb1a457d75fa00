# SPDX-License-Identifier: Apache-2.0
"""Replace each ``gradient`` equation by the backward computation it stands for."""

from tessera.graph.differentiation import differentiated
from tessera.graph.ir import Graph


def differentiate_losses(graph: Graph) -> Graph:
    """Replace each ``gradient`` equation by a backward pass. Numerics: exact.

    The equations between the weights and the loss become one function, run once under
    ``jax.vjp``; its intermediate values serve the rest of the program too, so the
    forward computation exists once, as in hand-written ``jax.value_and_grad``.

    Before:  y = sin w; l = sum y; g = gradient l w; out g
    After:   y = sin w; c = cos w; l = sum y; g = mul 1.0 c; out g

    Raises:
      UnconnectedGradientError: [T303] a loss does not depend on one of its weights.
      UndifferentiableError: [T317] a loop of unknown length leads to a loss.
    """
    return graph.with_program(differentiated(graph.program))
