"""A simulated region owner: answers every message on its socket with the same status, until it is killed.

python -m tests.fakes.owner SOCKET
"""

import contextlib
import os
import socket
import sys

import msgpack

STATUS = {"state": "ready", "done": 1, "total": 1, "source": "built", "fingerprint": bytes(32), "generation": bytes(16)}


def main(path: str) -> None:
    """Serves until a signal ends it."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(1024)
                connection.send(msgpack.packb(STATUS))


if __name__ == "__main__":
    main(sys.argv[1])
