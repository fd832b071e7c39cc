"""The errors of state, drawn:

StateError                 code               retryable
├── StateBudgetExceeded    state_budget       yes   no room for this sequence until another one is closed
├── NoFreeSlot             no_slot            yes   every slot holds a sequence
├── UnknownSlot            unknown_slot       no    the slot holds no sequence
├── CapacityExceeded       state_capacity     no    a sequence would outgrow what it was opened for
├── NoTrial                no_trial           no    there are no such trial rows to take over
└── SnapshotRefused        bad_snapshot       no    a parked conversation is damaged, or not of this model and tenant
"""

from __future__ import annotations


class StateError(Exception):
    """Base of every error that state raises on purpose."""

    code = "state"
    retryable = False


class StateBudgetExceeded(StateError):
    """Opening a sequence would pass the byte budget."""

    code = "state_budget"
    retryable = True

    def __init__(self, needed_bytes: int, free_bytes: int) -> None:
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes
        super().__init__(f"a sequence needs {needed_bytes} bytes of state, {free_bytes} are free")


class NoFreeSlot(StateError):
    """Every slot is taken."""

    code = "no_slot"
    retryable = True


class UnknownSlot(StateError, KeyError):
    """No sequence is open in the slot. Also a KeyError, as a mapping must raise."""

    code = "unknown_slot"
    __str__ = Exception.__str__  # a KeyError would show its message in quotes

    def __init__(self, slot: int) -> None:
        self.slot = slot
        super().__init__(f"slot {slot} holds no sequence")


class SnapshotRefused(StateError):
    """A parked conversation is damaged, or not of this model and tenant."""

    code = "bad_snapshot"


class CapacityExceeded(StateError):
    """A sequence would grow past its capacity."""

    code = "state_capacity"

    def __init__(self, tokens: int, capacity_tokens: int) -> None:
        self.tokens, self.capacity_tokens = tokens, capacity_tokens
        super().__init__(f"{tokens} tokens do not fit a state opened for {capacity_tokens}")


class NoTrial(StateError):
    """No trial window ran since the sequence moved on, or it had fewer rows."""

    code = "no_trial"
