# SPDX-License-Identifier: Apache-2.0
"""What every other room stands on: it knows none of them.

dtypes, tree                    names of dtypes, paths in trees
device_grid                     the order of devices in a mesh
primitive_properties            what JAX's primitives do to their operands
simulated_devices               devices of a CPU in place of those that are not here
context                         a context variable that has a value for a while
labels, config_files            a constant of losses, the folder of ``configs``
"""
