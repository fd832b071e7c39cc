"""The way to the processes of another host: one address, a name for each process, both ends with certificates.

Not here: the other end (host.gate), what is said. Invariant: what answers has shown the certificate of that very host
before a byte of a request is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from coordinator.host.identity import Identity, process_name

Options = Sequence[tuple[str, int | str]]


@dataclass(frozen=True, slots=True)
class Link:
    """From this host to one that joined."""

    host: str
    covered: str  # the name in its certificate
    address: str  # HOST:PORT of its gate
    identity: Identity  # of this host

    def channel(self, process: str, options: Options) -> grpc.aio.Channel:
        """To that process; it dials with its first call."""
        named = ("grpc.ssl_target_name_override", process_name(process, self.covered))
        # the authority of a call must be a name of the certificate
        kept = [option for option in options if option[0] != "grpc.default_authority"]
        return grpc.aio.secure_channel(self.address, self.identity.channel_credentials(), options=[*kept, named])
