"""The records of one key, each checked once at the border however often it is read. Knows no meaning of any of them.

Anybody may put a record, with as many keys as he likes: at most `RECORDS_MAX` are looked at, those known before first.
"""

from collections.abc import Collection, Iterable
from typing import Any, Generic, TypeVar

from echo_p2p.net.base import Record, Records
from echo_protocols.envelope import Border, Kind, Opened, Refusal
from echo_protocols.peer import RoleRecord

T = TypeVar("T")

RECORDS_MAX = 1024


class LastWord:
    """When any of some signers was last heard: the newest of their envelopes, whatever it is about.

    `at` is in Unix seconds by the signer's clock, 0.0 if there was none; `left` says whether that was a farewell.
    """

    def __init__(self, signers: Collection[str], at: float = 0.0) -> None:
        self.at = at
        self.left = False
        self._signers = signers

    def hear(self, opened: Iterable[Opened[Any]]) -> None:
        """Note what was read now."""
        for each in opened:
            if each.signer in self._signers and each.issued_at > self.at:
                self.at = each.issued_at
                self.left = isinstance(each.payload, RoleRecord) and each.payload.leaving


class CheckedRecords(Generic[T]):
    """Reads the envelopes under one key. A refusal is counted when its bytes are new, not at each look."""

    def __init__(self, records: Records, border: Border, key: str, kind: Kind[T], run_id: bytes) -> None:
        self._records = records
        self._border = border
        self._key = key
        self._kind = kind
        self._run_id = run_id
        self._checked: dict[str, tuple[bytes, Opened[T] | Refusal]] = {}  # by owner

    async def read(self, now: float) -> list[Opened[T]]:
        """What is under the key now, without what is refused. Raises NetError."""
        found = await self._records.get(self._key)
        self._checked = {owner: self._check(owner, found[owner], now) for owner in self._chosen(found)}
        return [opened for _, opened in self._checked.values() if isinstance(opened, Opened)]

    def _chosen(self, found: dict[str, Record]) -> list[str]:
        if len(found) <= RECORDS_MAX:
            return list(found)
        self._border.refuse("too-many-records", f"{len(found)} under {self._key}")
        good = [owner for owner in found if owner in self._checked and isinstance(self._checked[owner][1], Opened)]
        others = [owner for owner in found if owner not in set(good)]
        return (good + others)[:RECORDS_MAX]

    def _check(self, owner: str, record: Record, now: float) -> tuple[bytes, Opened[T] | Refusal]:
        known = self._checked.get(owner)
        if known is not None and known[0] == record.value:
            return known
        opened = self._border.open(record.value, self._kind, self._run_id, now)
        if isinstance(opened, Opened) and opened.signer != owner:
            opened = self._border.refuse("wrong-owner", f"{self._kind.name} of {opened.signer} under {owner}")
        return record.value, opened
