"""Counts the bytes of living tensor storages by label: for ``MemoryTrace``, and for the dry run of ``explain``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass
class _Entry:
    reference: StorageWeakRef
    nbytes: int
    label: str


class LiveStorages:
    """A table of storages that were added and are still alive. It holds weak references alone.

    Attributes:
        peak: the most bytes that were alive at once when a storage was added, since creation or :meth:`reset`.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._entries: dict[int, _Entry] = {}
        self._counted = 0  # bytes of all entries, also of storages that have ended
        self._at_peak: list[_Entry] = []

    @property
    def nbytes(self) -> int:
        """Bytes that are alive now."""
        for key in [key for key, entry in self._entries.items() if entry.reference.expired()]:
            self._forget(key)
        return self._counted

    def add(self, storages: Iterable[torch.UntypedStorage], label: str = "") -> None:
        """Add new storages, all before the peak is measured."""
        for storage in storages:
            reference = StorageWeakRef(storage)
            self._forget(reference.cdata)  # a new storage may have the address of one that has ended
            self._entries[reference.cdata] = _Entry(reference, storage.nbytes(), label)
            self._counted += storage.nbytes()
        if self._counted > self.peak and self.nbytes > self.peak:  # nbytes searches all entries, so it comes second
            self.peak, self._at_peak = self._counted, list(self._entries.values())

    def forget(self, storage: torch.UntypedStorage) -> None:
        """Do not count ``storage`` any longer."""
        self._forget(StorageWeakRef(storage).cdata)

    def _forget(self, key: int) -> None:
        if key in self._entries:
            self._counted -= self._entries.pop(key).nbytes

    def label(self, storage: torch.UntypedStorage, label: str, *, unless: str | None = None) -> None:
        """Set the label of ``storage``, also in the peak so far, if it is counted and its label is not ``unless``."""
        entry = self._entries.get(StorageWeakRef(storage).cdata)
        if entry is not None and entry.label != unless:
            entry.label = label

    def reset(self) -> None:
        """Restart the peak from the bytes that are alive now."""
        self.peak, self._at_peak = self.nbytes, list(self._entries.values())

    def by_label(self, *, at_peak: bool = False) -> dict[str, int]:
        """Bytes by label, alive now or ``at_peak``."""
        self.nbytes  # noqa: B018 - forgets storages that have ended
        sizes: Counter[str] = Counter()
        for entry in self._at_peak if at_peak else self._entries.values():
            sizes[entry.label] += entry.nbytes
        return dict(sizes)
