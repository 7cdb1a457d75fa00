# SPDX-License-Identifier: Apache-2.0
"""Rematerialization policies, one for each layer.

``policies_of`` parses the setting, ``scan_layers`` is the ``lax.scan`` over layers that
applies it: one scan for each run of adjacent layers with the same policy.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp

from tessera.errors import SettingConflictError, SettingValueError, did_you_mean
from tessera.foundations.tree import zeros
from tessera.ops.rematerialization import FULL as FULL
from tessera.ops.rematerialization import NAMED as NAMED
from tessera.ops.rematerialization import NONE as NONE
from tessera.ops.rematerialization import POLICIES as POLICIES
from tessera.ops.rematerialization import save_unless_quick
from tessera.ops.wide_gradients import read_copies
from tessera.train.models.pipeline_stages import StageSplit

Policies: TypeAlias = tuple[str, ...]
Body: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]

_KINDS: Final = ("global", "local")


def policies_of(remat: Any, kinds: Sequence[str]) -> Policies:
    """The policy of every layer.

    Args:
      remat: ``none`` saves all residuals of the backward pass; ``full`` saves the
        residual stream between layers and computes each layer twice; ``dots`` saves
        the results of matmuls, ``named`` the values that the model names by
        ``checkpoint_name``; any other name is a policy of
        ``jax.checkpoint_policies``. A list has one name for each layer, a dict one for
        ``global`` and one for ``local`` layers.
      kinds: The kind of each layer: ``global`` or ``local``, or one without a name.

    Raises:
      SettingValueError: [T502] a policy does not exist, or there is not one for
        each layer.

    Example:
      >>> from tessera.train.models.named_models import config_of
      >>> policies_of({"global": "full"}, config_of("tiny").layer_kinds)
      ('none', 'none', 'none', 'none', 'none', 'full')
    """
    count = len(kinds)
    if isinstance(remat, Mapping):
        for kind in remat:
            names = _KINDS if kinds[0] in _KINDS else ()
            _check_name(kind, names, "kind of layer", remat)
        policies = tuple(remat.get(kind, NONE) for kind in kinds)
    elif isinstance(remat, Sequence) and not isinstance(remat, str):
        policies = tuple(remat)
    else:
        policies = (remat,) * count
    for name in dict.fromkeys(policies):
        _check_name(name, (NONE, *POLICIES), "policy", remat)
    if len(policies) != count:
        raise SettingValueError(
            "a list of remat policies needs one for each layer",
            got=f"remat={_shown(remat)}: {len(policies)} policies, {count} layers",
            fix=f"give {count}, or one name for all layers"
            + (", or {global: full, local: none}" if kinds[0] in _KINDS else ""),
        )
    return policies


def policies_of_stage(policies: Policies, split: StageSplit | None) -> Policies:
    """The policies of a pipeline stage, by the position of a layer in it.

    Args:
      policies: One for each layer of the model.
      split: The layers of each virtual stage; None is one stage of all of them.

    Raises:
      SettingConflictError: [T507] the stages differ in their policies.
    """
    if split is None:
        return policies
    patterns = [policies[layers.start : layers.stop] for layers in split.runs]
    longest = max(patterns, key=len)
    if any(pattern != longest[: len(pattern)] for pattern in patterns):
        raise SettingConflictError(
            "the stages of a pipeline run one program, so their layers need the same "
            "policies",
            got="\n".join(f"stage {i}: {', '.join(p)}" for i, p in enumerate(patterns)),
            fix="give remat one name for all layers, or a list that repeats by stage",
        )
    return longest


def scan_layers(
    body: Body,
    carry: Any,
    layers: Any,
    policies: Policies,
    *,
    exists: jax.Array | None = None,
    leanly: bool = False,
    unroll: int = 1,
) -> tuple[Any, Any]:
    """``jax.lax.scan`` over layers with a rematerialization policy for each.

    Args:
      body: ``(carry, layer) -> (carry, result)``.
      carry: The input of the first layer.
      layers: Tree of arrays ``[layers, ...]``.
      policies: One for each layer, as ``policies_of`` gives them.
      exists: bool ``[layers]``: whether each is a layer, or padding, which leaves the
        carry as it is and whose results are zeros; None has no padding.
      leanly: Whether ``none`` saves nothing that is quick to compute again, such as
        activations, casts, and gathered weights, which would all be in memory at once.
      unroll: Layers in one step of a scan.

    Returns:
      The last carry, and the results of all layers stacked.
    """
    body = _reading_copies(body)
    if exists is not None:
        body, layers = _skipping_padding(body), (layers, exists)
    runs = [(name, len(list(same))) for name, same in groupby(policies)]
    scan = partial(_scan, body, leanly=leanly, unroll=unroll)
    if len(runs) == 1:
        return scan(carry, layers, runs[0])
    leaves, tree = jax.tree.flatten(layers)
    # Its transpose concatenates; that of slices would add gradients of full size.
    pieces = [jax.lax.split(leaf, [count for _, count in runs]) for leaf in leaves]
    results = []
    for run, piece in zip(runs, zip(*pieces, strict=True), strict=True):
        carry, result = scan(carry, jax.tree.unflatten(tree, piece), run)
        results.append(result)
    return carry, jax.tree.map(_concatenated, *results)


def _reading_copies(body: Body) -> Body:
    def read_and_run(carry: Any, layer: Any) -> tuple[Any, Any]:
        return body(carry, read_copies(layer))

    return read_and_run


def _skipping_padding(body: Body) -> Body:
    def skip(carry: Any, layer: Any) -> tuple[Any, Any]:
        return carry, zeros(jax.eval_shape(body, carry, layer)[1])

    def body_or_skip(carry: Any, layer: Any) -> tuple[Any, Any]:
        layer, exists = layer
        return jax.lax.cond(exists, body, skip, carry, layer)

    return body_or_skip


def _concatenated(*parts: jax.Array) -> jax.Array:
    return jnp.concatenate(parts)


def _scan(
    body: Body,
    carry: Any,
    layers: Any,
    run: tuple[str, int],
    *,
    leanly: bool,
    unroll: int,
) -> tuple[Any, Any]:
    """A scan over adjacent layers that share a policy."""
    name, count = run
    if name != NONE or leanly:
        body = jax.checkpoint(
            body,
            policy=POLICIES.get(name, save_unless_quick),
            # XLA does not merge computations across a loop, but may in a single step.
            prevent_cse=count <= unroll,
        )
    return jax.lax.scan(body, carry, layers, unroll=unroll)


def _check_name(name: Any, names: Sequence[str], what: str, remat: Any) -> None:
    if name not in names:
        raise SettingValueError(
            f"there is no remat {what} {name!r}",
            got=f"remat={_shown(remat)}",
            fix=did_you_mean(str(name), names),
        )


def _shown(remat: Any) -> str:
    return str(remat) if isinstance(remat, str) else repr(remat)
