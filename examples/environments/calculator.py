# SPDX-License-Identifier: Apache-2.0
"""A calculator that a model may call before it answers.

The records have a column ``answer``, and their messages say how to call it:
``<tool_call>{"name": "calculator", "arguments": {"expression": "12 * 7"}}</tool_call>``
as Qwen's models write it.

tessera train recipe=grpo grpo.environment=calculator:Calculator …
"""

import ast
import json
import operator
import re
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


class Calculator:
    """Answers calls; a turn without one is the model's answer, and is scored.

    Args:
      answer: The number that is right.
      **columns: The other columns of the record, which do not matter here.
    """

    def __init__(self, answer: float | str, **columns: Any) -> None:
        self._answer = float(answer)

    def step(self, messages: list[dict[str, Any]]) -> tuple[list[Any], Any, bool]:
        """The result of each call; or no message, the reward, and the end."""
        text = messages[-1]["content"]
        if calls := _CALL.findall(text):
            # Qwen's template has a role "tool"; Gemma's takes turns of two.
            results = "\n".join(map(_result, calls))
            return [{"role": "user", "content": results}], None, False
        numbers = _NUMBER.findall(text.replace(",", ""))
        is_right = bool(numbers) and abs(float(numbers[-1]) - self._answer) < 1e-6
        return [], float(is_right), True


def _result(call: str) -> str:
    """The value of a call, or what is wrong with it, which the model may mend."""
    try:
        expression = json.loads(call)["arguments"]["expression"]
        return f"{_value(ast.parse(str(expression)[:200], mode='eval').body):.12g}"
    except (ArithmeticError, LookupError, SyntaxError, TypeError, ValueError) as error:
        return f"error: {error}"


def _value(node: ast.expr) -> float:
    """The value of an expression of numbers, + - * / and parentheses."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.BinOp | ast.UnaryOp) and type(node.op) in _OPERATORS:
        if isinstance(node, ast.UnaryOp):
            return _OPERATORS[type(node.op)](_value(node.operand))
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"not arithmetic: {ast.unparse(node)}")
