# SPDX-License-Identifier: Apache-2.0
"""The decoder in PyTorch, eager or through ``torch.compile``."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from peer_setting import EPSILON, LEARNING_RATE, Setting
from torch import nn
from torch.nn import functional

Tree: TypeAlias = Any


class Block(nn.Module):
    """One decoder block."""

    def __init__(self, setting: Setting, weights: Tree) -> None:
        super().__init__()
        self.setting = setting
        for name, value in weights.items():
            self.register_parameter(name, nn.Parameter(torch.tensor(value)))

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        """On ``[rows, length, width]``."""
        rows, length, width = x.shape

        def heads(name: str) -> Any:
            shape = (rows, length, self.setting.heads, self.setting.head_width)
            return (y @ getattr(self, name).to(x.dtype)).view(shape).transpose(1, 2)

        y = rms_norm(x, self.norm_1)
        attended = functional.scaled_dot_product_attention(
            rotated(heads("query"), cos, sin),
            rotated(heads("key"), cos, sin),
            heads("value"),
            is_causal=True,
        )
        attended = attended.transpose(1, 2).reshape(rows, length, width)
        x = x + attended @ self.out.to(x.dtype)
        y = rms_norm(x, self.norm_2) @ self.up.to(x.dtype)
        return x + functional.gelu(y, approximate="tanh") @ self.down.to(x.dtype)


class Decoder(nn.Module):
    """All of them, between an embedding and the loss."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        weights = setting.weights()
        self.dtype = torch.bfloat16 if setting.dtype == "bf16" else torch.float32
        self.blocks = nn.ModuleList(
            Block(setting, block) for block in weights.pop("blocks")
        )
        for name, value in weights.items():
            self.register_parameter(name, nn.Parameter(torch.tensor(value)))
        for name, table in zip(("cos", "sin"), setting.rotations(), strict=True):
            self.register_buffer(name, torch.tensor(table))

    def forward(self, tokens: Any, targets: Any) -> Any:
        """The mean loss."""
        x = functional.embedding(tokens, self.embedding).to(self.dtype)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = rms_norm(x, self.norm) @ self.head.to(x.dtype)
        flat = logits.float().view(-1, logits.shape[-1])
        return functional.cross_entropy(flat, targets.view(-1))


def rms_norm(x: Any, scale: Any) -> Any:
    """RMSNorm in f32, in the dtype of ``x``."""
    return functional.rms_norm(x.float(), scale.shape, scale, EPSILON).to(x.dtype)


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    """Rotary embedding of ``[rows, heads, length, head_width]``."""
    first, second = x.float().chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


def step_of(setting: Setting, *, compiled: bool) -> tuple[Callable[..., Any], Tree]:
    """A step ``(state, tokens, targets) -> (state, loss)``, and a state."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Decoder(setting).to(device)
    optimizer = torch.optim.Adam(
        model.parameters(), LEARNING_RATE, fused=True if device == "cuda" else None
    )
    forward = torch.compile(model) if compiled else model

    def step(state: Tree, tokens: Any, targets: Any) -> tuple[Tree, Any]:
        words, labels = (
            torch.from_numpy(array).long().to(device) for array in (tokens, targets)
        )
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, setting.dtype == "autocast"):
            loss = forward(words, labels)
        loss.backward()
        optimizer.step()
        return state, loss.detach()

    return step, None
