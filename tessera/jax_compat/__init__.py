# SPDX-License-Identifier: Apache-2.0
"""The only door to JAX's private interfaces, and to what differs between its versions.

jaxprs, traces                  programs, and the traces that make them
primitives                      parameters of JAX's primitives, by meaning
equation_lines                  source lines, the user's and a library's
linearization                   differentiates repeated equations once
checked_calls, processes, mlir  calls of compiled programs, processes, modules
target_devices                  devices that are not here
packed_attention                attention by cuDNN over packed rows
workarounds                     ``CorrectJit``: ``jax.jit`` that avoids faults of XLA
"""
