# SPDX-License-Identifier: Apache-2.0
"""Random Python programs with control flow on two traced integers.

``draw(seed)`` is the source of a module whose ``program(x, y, s)`` takes two int32
scalars and a dict of state. Statements are drawn over what Python code uses: variables,
closures, globals, containers and their aliases, objects, exceptions, iterators, nested
conditionals, loops with ``break``, ``continue`` and ``return``. Values stay small, so
that int32 arithmetic is Python's. Loops are bounded.
"""

import random
from collections.abc import Callable

from tests.fuzz.program_header import HEADER


class Writer:
    """Draws the statements of one program.

    Attributes:
      ints: Variables that hold integers, in scope.
      wild: Whether statements that cannot be converted may be drawn.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.depth = 1
        self.loops = 0
        self.fresh = 0
        self.budget = self.random.randint(5, 22)
        self.wild = self.random.random() < 0.5
        self.ints = ["x", "y", "a", "b"]

    # --- text

    def put(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def name(self, stem: str) -> str:
        self.fresh += 1
        return f"{stem}{self.fresh}"

    def pick(self, *options: str) -> str:
        return self.random.choice(options)

    # --- expressions

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

    # --- statements

    def block(self, size: int | None = None) -> None:
        self.depth += 1
        names = list(self.ints)
        before = len(self.lines)
        for _ in range(size or self.random.randint(1, 3)):
            self.statement()
        if len(self.lines) == before:
            self.put("pass")
        self.ints = names
        self.depth -= 1

    def statement(self) -> None:
        self.budget -= 1
        compound = [self.if_, self.if_, self.if_, self.for_, self.while_, self.for_rows]
        if self.wild:
            compound += [
                self.try_,
                self.while_true,
                self.else_,
                self.class_,
                self.with_,
                self.nested,
                self.lambdas,
                self.match,
            ]
        if self.budget > 0 and self.depth < 5 and self.random.random() < 0.45:
            self.random.choice(compound)()
        else:
            self.simple()

    def if_(self) -> None:
        self.put(f"if {self.condition()}:")
        self.block()
        if self.random.random() < 0.25:
            self.put(f"elif {self.condition()}:")
            self.block()
        if self.random.random() < 0.6:
            self.put("else:")
            self.block()

    def for_(self) -> None:
        turns = self.pick("2", "3", "abs(y) % 3", "clip(x, 0, 3)", "len(items)")
        self.loop(f"for {self.loop_name()} in range({turns}):")

    def for_rows(self) -> None:
        rows = self.pick(
            "rows", "items[:]", "list(tags)", "enumerate(rows)", "zip(rows, rows)",
            "sorted(d)", "(1, 2)", *(["it", "numbers(2)", "gen"] if self.wild else []),
        )  # fmt: skip
        pair = rows.startswith(("enumerate", "zip"))
        names = f"{self.loop_name()}, {self.loop_name()}" if pair else self.loop_name()
        if rows == "sorted(d)":
            names = "_"
        self.loop(f"for {names} in {rows}:")

    def loop_name(self) -> str:
        name = self.pick("i", "j", "a")
        if name not in self.ints and self.random.random() < 0.5:
            self.ints.append(name)
        return name

    def while_(self) -> None:
        count = self.name("turn")
        self.put(f"{count} = 0")
        self.loop(f"while {count} < 3 and {self.condition(1)}:", f"{count} += 1")

    def while_true(self) -> None:
        count = self.name("turn")
        self.put(f"{count} = 0")
        self.put("while True:")
        self.depth += 1
        self.put(f"{count} += 1")
        self.put(f"if {count} > 2 or {self.condition(1)}:")
        self.put("    break")
        self.depth -= 1
        self.loops += 1
        self.block()
        self.loops -= 1

    def else_(self) -> None:
        self.for_()
        self.put("else:")
        self.block(1)

    def class_(self) -> None:
        name = self.name("Local")
        self.put(f"class {name}:")
        self.put("    shared = a")
        self.put("    def get(self, by):")
        self.put("        if by > 1:")
        self.put("            return by - 1")
        self.put("        return self.shared")
        self.put(f"b = {name}().get({self.expression(1)})")

    def loop(self, head: str, first: str = "") -> None:
        self.put(head)
        if first:
            self.depth += 1
            self.put(first)
            self.depth -= 1
        self.loops += 1
        self.block()
        self.loops -= 1

    def try_(self) -> None:
        self.put("try:")
        self.block()
        if self.random.random() < 0.6:
            self.depth += 1
            self.put(f"if {self.condition()}:")
            self.put(f"    raise {self.pick('ValueError', 'KeyError(1)', 'TypeError')}")
            self.depth -= 1
        kind = self.pick(
            "ValueError", "Exception", "(KeyError, TypeError)", "LookupError"
        )
        self.put(f"except {kind}:")
        self.block(1)
        if self.random.random() < 0.3:
            self.put("finally:")
            self.block(1)

    def with_(self) -> None:
        self.put(f"with {self.pick('contextlib.suppress(ValueError)', 'Quiet()')}:")
        self.block()
        if self.random.random() < 0.5:
            self.depth += 1
            self.put(f"if {self.condition()}:")
            self.put("    raise ValueError('mine')")
            self.depth -= 1

    def nested(self) -> None:
        name, argument = self.name("inner"), self.pick("p", "a")
        self.put(f"def {name}({argument}, q=1):")
        outer, loops = list(self.ints), self.loops
        self.loops = 0
        if self.random.random() < 0.5 and argument != "a":
            self.depth += 1
            self.put("nonlocal a")
            self.depth -= 1
        self.ints = [*dict.fromkeys([*outer, argument])]
        self.block(2)
        self.depth += 1
        self.put(f"return {self.expression(1)}")
        self.depth -= 1
        self.ints, self.loops = outer, loops
        self.put(f"{self.pick('a', 'b')} = {name}({self.expression(1)}) % 19")

    def lambdas(self) -> None:
        name = self.name("calls")
        self.put(f"{name} = []")
        self.put(f"for {self.pick('i', 'a')} in range(3):")
        self.put("    late = a + 1")
        self.put(f"    {name}.append(lambda: {self.pick('late', 'a', 'late + b')})")
        self.put(f"b = {name}[{self.pick('0', '1')}]()")

    def match(self) -> None:
        subject = self.pick("d", "items", "'text'", "(1, 2)", "box")
        self.put(f"match {subject}:")
        self.depth += 1
        for case in ('{"k": caught}', "[caught, *_]", "Box(v=caught)"):
            self.put(f"case {case}:")
            self.ints.append("caught")
            self.block(1)
            self.ints.remove("caught")
        self.put("case _:")
        self.block(1)
        self.depth -= 1

    def simple(self) -> None:
        value: Callable[[], str] = self.expression
        options = [
            lambda: f"{self.pick('a', 'b', 'x')} = {value()}",
            lambda: f"{self.pick('a', 'b')} = {value()}",
            lambda: f"{self.pick('a', 'b')} += {value()}",
            lambda: "a, b = b, a",
            lambda: f'd["k"] = {value()}',
            lambda: f'd["k"] += {value()}',
            lambda: f'd["inner"]["m"] = {value()}',
            lambda: f"items[0] = {value()}",
            lambda: f'{self.pick("d", "alias")}["k"] -= {value()}',
            lambda: f"alias = {self.pick('d', 'dict(d)')}",
            lambda: f'd = {{"k": {value()}, "inner": {{"m": {value()}}}}}',
            lambda: f'd["inner"] = {{"m": {value()}}}',
            lambda: f"items = [{value()}, {value()}]",
            lambda: f'items[0], d["k"] = d["k"], {value()}',
            lambda: f"d.update(k={value()})",
            lambda: f"box.v = {value()}",
            lambda: f"box.items[0] = {value()}",
            lambda: f's["n"] = {value()}',
            lambda: f's["n"] += {value()}',
            lambda: f's["opt"] = {{"m": {value()}}}',
            lambda: f's["opt"]["m"] += {value()}',
            lambda: f's["rows"][0] = {value()}',
            lambda: f"pair = ({value()}, pair[0])",
            lambda: f"pair = (pair[1], {value()})",
            lambda: f"dq[0] = {value()}",
            lambda: f"cnt['p'] += {value()}",
            lambda: f"slot.v = {value()}",
            lambda: f"nest[0]['q'] = {value()}",
            lambda: f"nest[1] = [{value()}]",
            lambda: f"nest[0] = {{'q': {value()}}}",
            lambda: f"point = Pair({value()}, point.left)",
            lambda: f"point = point._replace(right={value()})",
            lambda: f"bag['k'] = {value()}",
            lambda: f"held['m'] += {value()}",
            lambda: "held = s['opt']",
            lambda: "held = d['inner']",
            lambda: f"items[:1] = [{value()}]",
            lambda: f"box.v, a = a, {value()}",
            lambda: f"inner = d['inner']; inner['m'] += {value()}",
            lambda: "d['inner'], s['opt'] = s['opt'], d['inner']",
            lambda: f"s['opt'] = replaced(s['opt'], {value()})",
        ]
        growing = [
            lambda: f"items.append({value()})",
            lambda: "items.pop() if len(items) > 2 else None",
            lambda: f'd["new"] = {value()}',
            lambda: f"tags.add({self.number()})",
            lambda: "tags.discard(1)",
            lambda: f"dq.append({value()})",
            lambda: f"cnt.update(p={value()})",
            lambda: f'd.setdefault("k", {value()})',
            lambda: "items.reverse()",
            lambda: 's["opt"] = dict(s["opt"])',
        ]
        wild = [
            lambda: f"bump_global({value()})",
            lambda: f"bump({value()})",
            lambda: f'TABLE["k"] = {value()}',
            lambda: f"LOG.append({value()})",
            lambda: f"LOG[0] = {value()}",
            lambda: "TAGS.add(5)",
            lambda: f"NUMBERS[0] = {self.number()}",
            lambda: "array[1] = 7",
            lambda: "array += 1",
            lambda: f"Box.made = {value()}",
            lambda: "Box.made += 1",
            lambda: f"GLOBAL_BOX.v = {value()}",
            lambda: f"box += {value()}",
            lambda: "next(it, 0)",
            lambda: "first, *rest = it",
            lambda: "skipped = list(itertools.islice(it, 1))",
            lambda: f"shared()['n'] = {value()}",
            lambda: f"setattr(box, 'v', {value()})",
            lambda: f"alias = {self.pick('s', 's[chr(111) + chr(112) + chr(116)]')}",
            lambda: f"box = Box({value()})",
            lambda: "box.twin = box",
            lambda: "s['rows'] = items",
            lambda: "items = s['rows']",
            lambda: "d['inner'] = s['opt']",
            lambda: "tags |= {3}",
            lambda: "tags = tags | {4}",
            lambda: "items += [1]",
            lambda: "del b; b = 1",
            lambda: "NUMBERS.sort()",
            lambda: "dq.popleft() if len(dq) > 1 else None",
            lambda: "dq.rotate(1)",
            lambda: f"other = functools.partial(box.add)({value()})",
            lambda: "vars(box)['v'] = 3",
            lambda: "clip.calls = getattr(clip, 'calls', 0) + 1",
            lambda: "raise ValueError('mine')",
            lambda: "nest.append(nest[1])",
            lambda: f"nest[1].append({value()})",
            lambda: "alias = nest[0]",
            lambda: "nest[0] = d",
            lambda: f"del d['inner']['m']; d['inner']['m'] = {value()}",
            lambda: "items, s['rows'] = s['rows'], items",
            lambda: "assert a is not None",
            lambda: "text = f'{a}'",
            lambda: "bag.update(k=3)",
            lambda: "random.shuffle(LOG)",
            lambda: f"globals()['COUNT'] = {value()}",
            lambda: "type(box).made = 4",
            lambda: f"object.__setattr__(box, 'v', {value()})",
            lambda: f"rows = rows + {value()}",
            lambda: "items.sort(key=lambda v: 0)",
            lambda: f"dq.extend([{value()}])",
            lambda: "cnt = cnt + collections.Counter(p=1)",
            lambda: "tags -= {1}",
            lambda: "gen.close()",
            lambda: f"d |= {{'k': {value()}}}",
        ]
        if self.loops and self.random.random() < 0.12:
            self.put(self.pick("break", "continue", f"return {self.result()}"))
        elif self.random.random() < 0.04:
            self.put(f"return {self.result()}")
        else:
            pools = [options, options, options, growing] + ([wild] if self.wild else [])
            self.put(self.random.choice(self.random.choice(pools))())

    def result(self) -> str:
        return (
            "(x, y, a, b, d, alias, held, items, box.v, pair, s, sorted(tags), "
            "list(dq), dict(cnt), slot.v, point, nest, dict(bag))"
        )

    def program(self) -> str:
        self.put("a, b, flag = 1, y % 5, True")
        self.put('d = {"k": x, "inner": {"m": 2}}')
        self.put("items = [x, 3]")
        self.put("alias = d")
        self.put('held = s["opt"]')
        self.put("pair = (x, 2)")
        self.put("box = Box(y)")
        self.put("slot = Slotted(1)")
        self.put("point = Pair(1, y)")
        self.put("nest = [{'q': 1}, [y]]")
        self.put("bag = Bag(k=2)")
        self.put("random.seed(3)")
        self.put("tags = {1, 2}")
        self.put("dq = collections.deque([y, 1], maxlen=3)")
        self.put("cnt = collections.Counter({'p': 1})")
        self.put("rows = jnp.stack([x, y, x + y])")
        self.put("it = iter([1, 2, 3, 4, 5, 6, 7, 8, 9])")
        self.put("gen = numbers(9)")
        self.put("array = np.array([1, 2, 3], np.int32)")
        self.put("count = 0")
        self.put("def bump(by):")
        self.put("    nonlocal count")
        self.put("    count = (count + by) % 13")
        self.put("    return count")
        while self.budget > 0:
            self.statement()
        self.put("a = (a + count + COUNT + len(LOG) + TABLE['k']) % 101")
        self.put(f"return {self.result()}")
        return "\n".join([HEADER, "", "def program(x, y, s):", *self.lines, ""])


def draw(seed: int) -> str:
    """The source of one program."""
    return Writer(seed).program()
