import signal
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
from torch.distributed import TCPStore


def test_agents_can_meet_until_a_signal_ends_it():
    command = [sys.executable, "-m", "resilin.cli", "store", "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = int(process.stdout.readline().split()[-1])
            store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=20))
            store.set("here", "yes")
            assert store.get("here") == b"yes"
            # On that address and on no other.
            with pytest.raises(OSError, match="refused"):
                socket.create_connection(("127.0.0.2", port), timeout=20)
            taken = subprocess.run([*command[:-1], str(port)], timeout=60, stdout=subprocess.PIPE)
            assert taken.returncode == 1
            assert f"no store on 127.0.0.1:{port}" in taken.stdout.decode()
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()
