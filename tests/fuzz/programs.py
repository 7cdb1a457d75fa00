# SPDX-License-Identifier: Apache-2.0
"""Random Python programs with control flow on two traced integers.

``draw(seed)`` is the source of a module whose ``program(x, y, s)`` takes two int32
scalars and a dict of state. Statements are drawn over what Python code uses: variables,
closures, globals, containers and their aliases, objects, exceptions, iterators, nested
conditionals, loops with ``break``, ``continue`` and ``return``. Values stay small, so
that int32 arithmetic is Python's. Loops are bounded.
"""

from collections.abc import Callable

from tests.fuzz.program_expressions import Expressions
from tests.fuzz.program_header import HEADER


class Writer(Expressions):
    """Draws the statements of one program."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.lines: list[str] = []
        self.depth = 1
        self.loops = 0
        self.fresh = 0

    # --- text

    def put(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def name(self, stem: str) -> str:
        self.fresh += 1
        return f"{stem}{self.fresh}"

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
