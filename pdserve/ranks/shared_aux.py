"""Metadata slots on a decode server of many ranks: peers write the leader's, and all ranks read the same."""

from __future__ import annotations

from pdserve.ranks.input_log import InputLog
from pdserve.transfer.aux import AuxRecord, MetadataBuffers


class SharedMetadata(MetadataBuffers):
    """One rank's slots; what is read is what the leader's hold."""

    def __init__(self, num_slots: int, log: InputLog, *, shareable: bool = True) -> None:
        super().__init__(num_slots, shareable=shareable)
        self._log = log

    def read(self, slot: int) -> AuxRecord:
        """The content of the leader's slot."""
        self.put_in(slot, self._log.answer(lambda: self.take_out(slot)))
        return super().read(slot)
