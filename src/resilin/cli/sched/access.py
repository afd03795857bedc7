"""The state directory of a controller, and the way from a command to it: URL and token."""

from __future__ import annotations

import argparse
import json
import os
import secrets
from pathlib import Path

from resilin.cluster.controller.client import Client
from resilin.cluster.controller.launch import SCHEDULER, SCHEDULER_CA

TOKEN = "token"
"""Name of the file with the token of the cluster."""
ADDRESS = "address.json"
"""Name of the file with the URL of the controller."""


def state_directory() -> Path:
    """The default state directory."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "resilin"


def add_state(parser: argparse.ArgumentParser) -> None:
    """Add the option `--state`."""
    parser.add_argument(
        "--state",
        type=Path,
        metavar="DIR",
        help="State directory of the controller (default: ~/.local/state/resilin).",
    )


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add the options that find a controller."""
    parser.add_argument(
        "--url",
        metavar="URL",
        help=f"URL of the controller (default: ${SCHEDULER}, or that in the state directory).",
    )
    add_state(parser)


def client(args: argparse.Namespace) -> Client:
    """The controller that the options, the environment or the state directory name.

    Raises:
        ValueError: None of them does, or there is no token.
    """
    directory = args.state or state_directory()
    url = args.url or os.environ.get(SCHEDULER)
    if not url:
        try:
            url = str(json.loads((directory / ADDRESS).read_text())["url"])
        except FileNotFoundError:
            raise ValueError(
                f"no controller is known: give --url or {SCHEDULER}, or --state with the state "
                f"directory of one that runs here ({directory} has none)"
            ) from None
    try:
        token = (directory / TOKEN).read_text().strip()
    except FileNotFoundError:
        raise ValueError(
            f"{directory / TOKEN} must hold the token of the controller: copy it from its state "
            "directory"
        ) from None
    return Client(url, token, ca=os.environ.get(SCHEDULER_CA))


def ensure_token(directory: Path) -> str:
    """The token of the cluster, made at the first time, for its owner alone to read."""
    path = directory / TOKEN
    if path.exists():
        return path.read_text().strip()
    temporary = directory / f"{TOKEN}.{os.getpid()}"
    file = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    os.write(file, (secrets.token_hex(32) + "\n").encode())
    os.fsync(file)
    os.close(file)
    temporary.rename(path)
    return path.read_text().strip()
