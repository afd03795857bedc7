"""A process between a launcher and etcd: `python proxy.py HOST:PORT` prints its own port.

Stopped with SIGSTOP it is a network that loses every packet; nobody is told.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading


def forward(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def serve(listening: socket.socket, target: tuple[str, int]) -> None:
    while True:
        client, _ = listening.accept()
        try:
            server = socket.create_connection(target)
        except OSError:
            client.close()
            continue
        for pair in ((client, server), (server, client)):
            threading.Thread(target=forward, args=pair, daemon=True).start()


if __name__ == "__main__":
    host, _, port = sys.argv[1].rpartition(":")
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    serve(listening, (host, int(port)))
