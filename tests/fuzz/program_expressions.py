# SPDX-License-Identifier: Apache-2.0
"""Random expressions and conditions over the variables of a random program."""

import random


class Expressions:
    """Draws the expressions of one program.

    Attributes:
      ints: Variables that hold integers, in scope.
      wild: Whether code that cannot be converted may be drawn.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.budget = self.random.randint(5, 22)
        self.wild = self.random.random() < 0.5
        self.ints = ["x", "y", "a", "b"]

    def pick(self, *options: str) -> str:
        return self.random.choice(options)

    def number(self) -> str:
        return str(self.random.randint(-2, 5))

    def expression(self, depth: int = 2) -> str:
        draw = self.random.random()
        if depth == 0 or draw < 0.25:
            return self.pick(*self.ints, self.number())
        inner = depth - 1
        if draw < 0.5:
            first, second = self.expression(inner), self.expression(inner)
            return f"({first} {self.pick('+', '-', '+')} {second})"
        if draw < 0.58:
            return f"({self.expression(inner)} % {self.pick('3', '5', '7')})"
        if draw < 0.7:
            first, test, second = (
                self.expression(inner),
                self.condition(inner),
                self.expression(inner),
            )
            return f"({first} if {test} else {second})"
        options = [
            'd["k"]',
            'd["inner"]["m"]',
            "items[0]",
            "items[-1]",
            "box.v",
            'alias["k"]',
            's["n"]',
            's["opt"]["m"]',
            's["rows"][1]',
            "pair[0]",
            "len(items)",
            "len(d)",
            f"clip({self.expression(inner)})",
            f"box.choose({self.expression(inner)})",
            f"max({self.expression(inner)}, {self.expression(inner)})",
            "sum(items[:2])",
            f"mode_of({self.expression(inner)}, 'a')",
            f"mode_of({self.expression(inner)}, [2, 3])",
            f"sum(v for v in [{self.expression(inner)}, 1] if v is not None)",
            f"(lambda q: q + 1)({self.expression(inner)})",
            f"classify({self.expression(inner)})",
            f"first_even([{self.expression(inner)}, 3, b], a)",
            "factorial(3)",
            f"guarded({self.expression(inner)})",
            f"both({self.expression(inner)}, *(1, 2), third=a, **dict(fourth=1))",
            f"(not {self.expression(inner)}) + 1",
            "sum(k for k, v in enumerate(items) if k < 1)",
            "max(items[0], items[-1], a)",
            "point.left",
            "rows[1]",
            "nest[0]['q']",
            "nest[1][0]",
            "held['m']",
            "int(flag)",
            "len([v for v in items])",
            "bag['k']",
            f"[{self.expression(inner)}, b][0]",
            f"{{'z': {self.expression(inner)}}}['z']",
            f"functools.partial(clip, high=4)({self.expression(inner)})",
            f"functools.partial(box.choose)({self.expression(inner)})",
            "box.double",
            "dq[0]",
            "cnt['p']",
            "len(tags)",
            "slot.v",
            "int(NUMBERS[1])",
        ]
        if self.wild:
            options += [
                "bump(1)", "bump(2)", "bump_global(1)", "log(2)", "next(it)", "COUNT",
                "LOG[0]", "TABLE['k']", "len(LOG)", "box.add(1)", "GLOBAL_BOX.v",
                "GLOBAL_BOX.add(1)", "next(gen)", "(w := a + 1)", "sum(it)", "Box.made",
                "box.hidden(1)", "functools.partial(box.add)(2)", "update(s, 1)",
                "shared()['n']", "replaced(s['opt'], a)['m']", "random.randint(1, 3)",
                "(lambda: (bump(1), a)[1])()", "[bump(1) for _ in range(2)][1]",
                "(a if (m := b) > 1 else m)", "list(map(bump, [1, 2]))[-1]",
                "(2 in it)", "box.items.pop() if len(box.items) > 1 else 0",
            ]  # fmt: skip
        return self.random.choice(options)

    def condition(self, depth: int = 2) -> str:
        draw = self.random.random()
        if draw < 0.7 or depth == 0:
            sign = self.pick(">", "<", "==", ">=", "!=")
            return f"{self.expression(max(depth - 1, 0))} {sign} {self.number()}"
        if draw < 0.8:
            word = self.pick("and", "or")
            return f"({self.condition(depth - 1)} {word} {self.condition(depth - 1)})"
        if draw < 0.86:
            return f"not {self.condition(depth - 1)}"
        if draw < 0.92:
            return f"0 < {self.expression(depth - 1)} <= 4"
        return self.pick(
            "len(items) > 1",
            "1 in tags",
            "'k' in d",
            "flag",
            "alias is d",
            "held is s['opt']",
        )
