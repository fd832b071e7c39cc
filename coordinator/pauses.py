"""How long the one event loop may stand still for reasons that no line of code names: threads, and garbage collection.

    give_way             a worker thread in Python code (rendering, parsing) gives the interpreter back after 0.1 ms; by
                         default 5 ms, which each token that arrives meanwhile would wait
    leave_out_of_search  what lives as long as the process (modules, tokenizer, doors) is not looked through again: a
                         full collection of it takes 50 ms

Not here: work of our own that is long (that goes to threads or in pieces). Both hold for a whole process: called by the
coordinator's own, never by a library or a test.
"""

from __future__ import annotations

import gc
import sys
from typing import Final

_SWITCH_S: Final = 1e-4


def give_way() -> None:
    """Call once, first thing in the process."""
    sys.setswitchinterval(_SWITCH_S)


def leave_out_of_search() -> None:
    """Call once everything that stays is there."""
    gc.collect()
    gc.freeze()
