# SPDX-License-Identifier: Apache-2.0
"""What holds while a function is traced, for whatever it calls.

scope                           the open trace: its mesh, its parameters, layouts
casts                           the open ``ts.autocast``
object_arguments, references,   NNX objects and mutable arrays among the arguments
static_attributes
per_device_checks               what a kernel must not do with reduced values
"""
