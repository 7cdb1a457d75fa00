# SPDX-License-Identifier: Apache-2.0
"""``BatchPart``: the rows that share one pool of blocks, waiting or in slots.

A row is admitted to a free slot when there are blocks for it. The blocks of a prompt
are computed once and shared by its rows, but for the last one, into which each row
writes: it gets a copy. When blocks run out, the row that was admitted last waits again;
the tokens that it has are kept, and computed again with its prompt.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tessera.train.rollouts.block_pool import NO_BLOCK, BlockPool

# Of each kind of layer, the blocks of a row in order.
Tables = list[list[int]]


@dataclass(eq=False)
class Row:
    """A prompt, and what was drawn after it.

    Attributes:
      number: Its index among the prompts of a call.
      prompt: Token ids.
      limit: The most tokens that are drawn.
      tokens: What was drawn.
      log_probs: Of these tokens.
      tables: Where it is cached, while it is in a slot.
      writes: Of each kind of layer, the blocks of the tokens of a dispatch.
    """

    number: int
    prompt: tuple[int, ...]
    limit: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    tables: Tables = field(default_factory=list)
    writes: Tables = field(default_factory=list)

    @property
    def cached(self) -> int:
        """Tokens in the cache while it is in a slot: all but the last."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def last(self) -> int:
        """The last token."""
        return (self.tokens or self.prompt)[-1]


@dataclass
class Fill:
    """Tokens whose keys and values are to be computed.

    Attributes:
      tokens: The whole row up to the last of them.
      start: How many of them are cached, a multiple of the block.
      tables: The blocks of the row.
    """

    tokens: Sequence[int]
    start: int
    tables: Tables

    @property
    def missing(self) -> int:
        """Tokens that are not cached."""
        return len(self.tokens) - self.start


class BatchPart:
    """The slots, blocks and waiting rows of one part of a batch.

    Args:
      slots: Rows that are computed at a time.
      pools: The sizes of the pools, by kind of layer.
      windows: Tokens that each kind of layer attends to.
      block: Tokens of a block.
      steps: Tokens of each row in one dispatch.

    Attributes:
      slots: The row in each slot.
      waiting: Rows that are not in a slot.
    """

    def __init__(
        self,
        slots: int,
        pools: Sequence[int],
        windows: Sequence[int | None],
        block: int,
        steps: int,
    ) -> None:
        self.slots: list[Row | None] = [None] * slots
        self.waiting = deque[Row]()
        self._pools = [BlockPool(size) for size in pools]
        self._windows, self._block, self._steps = windows, block, steps
        self._admitted = list[Row]()  # in this order
        self._prefixes: dict[tuple[int, ...], Tables] = {}

    def admit(self) -> tuple[list[Fill], list[Fill]]:
        """Put waiting rows into free slots.

        Returns:
          What is to be computed first, prompts, and then, the tokens after them.
        """
        prompts, tokens = list[Fill](), list[Fill]()
        same = Counter(row.prompt for row in self.waiting)
        while self.waiting and None in self.slots:
            row = self.waiting[0]
            # Rows in slots get their next tokens first.
            spare = (self._steps // self._block + 2) * len(self._admitted)
            if not self._make_room(self._missing(row), row.prompt, spare):
                break
            self.waiting.popleft()
            prompts += self._add_prefix(row.prompt)
            tokens += self._start(row)
            same[row.prompt] -= 1
            if not same[row.prompt]:
                self._drop_prefix(row.prompt)
            self.slots[self.slots.index(None)] = row
            self._admitted.append(row)
        return prompts, tokens

    def grow(self) -> None:
        """Give each row in a slot the blocks of its next tokens: ``Row.writes``."""
        for row in [*self._admitted]:
            # A row that waits again has no tables.
            while row.tables and not self._make_room(self._new(row), row.prompt):
                self._put_back(self._admitted[-1])
            row.writes = [
                [
                    table[index] if is_own else pool.take(1)[0]
                    for index, is_own in self._written(row, pool, table)
                ]
                for pool, table in zip(self._pools, row.tables, strict=False)
            ]

    def commit(self, row: Row) -> None:
        """Give a row's writes to its table, after a dispatch has got both."""
        first = row.cached // self._block
        for pool, table, writes in zip(
            self._pools, row.tables, row.writes, strict=True
        ):
            old = zip(table[first:], writes, strict=False)
            pool.release(before for before, now in old if before != now)
            table[first:] = writes

    def trim(self) -> None:
        """Release the blocks that are before the windows of all later tokens."""
        for row in self._admitted:
            self._trim(row.tables, row.cached)
        for prompt, tables in self._prefixes.items():
            self._trim(tables, self._whole(prompt) * self._block)

    def finish(self, row: Row) -> None:
        """Free the slot and the blocks of a row."""
        for pool, table in zip(self._pools, row.tables, strict=True):
            pool.release(table)
        row.tables = []
        self._admitted.remove(row)
        self.slots[self.slots.index(row)] = None

    def _put_back(self, row: Row) -> None:
        self.finish(row)
        self.waiting.appendleft(row)

    def _whole(self, prompt: tuple[int, ...]) -> int:
        """Blocks of a prompt that no row writes to: without its last token."""
        return (len(prompt) - 1) // self._block

    def _add_prefix(self, prompt: tuple[int, ...]) -> Iterator[Fill]:
        """Make the blocks of a prompt, unless there are some."""
        if prompt not in self._prefixes:
            count = -(-(len(prompt) - 1) // self._block)
            tables = [pool.take(count) for pool in self._pools]
            self._prefixes[prompt] = tables
            yield from self._fill(prompt[:-1], 0, tables)

    def _start(self, row: Row) -> Iterator[Fill]:
        """Give a row the blocks of its prompt, and own ones for tokens that it has."""
        shared = None if not row.tokens else self._whole(row.prompt)
        prefix = self._prefixes[row.prompt]
        row.tables = [
            pool.share(table[:shared])
            for pool, table in zip(self._pools, prefix, strict=True)
        ]
        if shared is not None:
            for pool, table in zip(self._pools, row.tables, strict=True):
                table += pool.take(-(-row.cached // self._block) - shared)
            known = (*row.prompt, *row.tokens)[:-1]
            yield from self._fill(known, shared * self._block, row.tables)

    def _fill(
        self, tokens: Sequence[int], start: int, tables: Tables
    ) -> Iterator[Fill]:
        if start < len(tokens):
            yield Fill(tokens, start, [[*table] for table in tables])

    def _missing(self, row: Row) -> list[int]:
        """The blocks by kind that ``_add_prefix`` and ``_start`` take."""
        count = 0
        if row.prompt not in self._prefixes:
            count += -(-(len(row.prompt) - 1) // self._block)
        if row.tokens:
            count += -(-row.cached // self._block) - self._whole(row.prompt)
        return [count] * len(self._pools)

    def _written(
        self, row: Row, pool: BlockPool, table: list[int]
    ) -> Iterator[tuple[int, bool]]:
        """The blocks of a row's next tokens, and whether they are its own already."""
        end = row.cached + min(self._steps, row.limit - len(row.tokens))
        for index in range(row.cached // self._block, -(-end // self._block)):
            yield index, index < len(table) and pool.uses[table[index]] == 1

    def _new(self, row: Row) -> list[int]:
        """The blocks by kind that a row's next tokens take."""
        return [
            sum(not is_own for _, is_own in self._written(row, pool, table))
            for pool, table in zip(self._pools, row.tables, strict=True)
        ]

    def _make_room(
        self, counts: Sequence[int], prompt: tuple[int, ...], spare: int = 0
    ) -> bool:
        """Whether there are so many free blocks; drops prompts that no row uses."""
        while any(
            count + spare > pool.num_free
            for count, pool in zip(counts, self._pools, strict=True)
        ):
            unused = (own for own in self._prefixes if own != prompt)
            if (one := next(filter(self._is_unused, unused), None)) is None:
                return False
            self._drop_prefix(one)
        return True

    def _is_unused(self, prompt: tuple[int, ...]) -> bool:
        return all(
            pool.uses[block] <= 1
            for pool, table in zip(self._pools, self._prefixes[prompt], strict=True)
            for block in table
        )

    def _drop_prefix(self, prompt: tuple[int, ...]) -> None:
        tables = self._prefixes.pop(prompt)
        for pool, table in zip(self._pools, tables, strict=True):
            pool.release(table)

    def _trim(self, tables: Tables, cached: int) -> None:
        for pool, window, table in zip(self._pools, self._windows, tables, strict=True):
            if window is not None:
                end = max(cached + 1 - window, 0) // self._block
                pool.release(table[:end])
                table[:end] = [NO_BLOCK] * len(table[:end])
