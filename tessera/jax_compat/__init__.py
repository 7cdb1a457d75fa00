# SPDX-License-Identifier: Apache-2.0
"""The only door to JAX's private interfaces, and to what differs between its versions.

jaxprs, traces                  programs, and the traces that make them
primitives                      parameters of JAX's primitives, by meaning
lines                           source lines, the user's and a library's
dispatch, processes, mlir       calls of compiled programs, processes, modules
target_devices, cudnn           devices that are not here, kernels of cuDNN
workarounds                     ``CorrectJit``: ``jax.jit`` that avoids faults of XLA
"""
