"""The door of an authority that is reached over a network: who enters has proved who it is."""

from __future__ import annotations

from resilin.engine.live.proof import Greeting
from resilin.engine.live.wire import Connection, Message


class Door:
    """Connections that have claimed a name, and have not proved yet that they belong to the job.

    Args:
        secret: The secret of the job.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._greetings: dict[Connection, Greeting] = {}

    def __contains__(self, connection: Connection) -> bool:
        """Whether a connection has claimed a name that it has to prove."""
        return connection in self._greetings

    def challenge(self, connection: Connection, claim: Message) -> Message:
        """The answer to a claim.

        Raises:
            ValueError: The connection has made one before, or it has another form.
        """
        match claim:
            case {"name": str(name), "nonce": str(nonce)} if connection not in self:
                greeting = self._greetings[connection] = Greeting(name, nonce).challenged()
                return greeting.challenge(self._secret)
        raise ValueError(f"{claim!r:.200} must be the claim of a name, once in a connection")

    def check(self, connection: Connection, proof: str) -> str:
        """The name that a connection has proved.

        Raises:
            ValueError: It does not know the secret.
        """
        greeting = self._greetings.pop(connection)
        greeting.check(self._secret, proof)
        return greeting.name

    def forget(self, connection: Connection) -> None:
        """Forget a connection that was closed."""
        self._greetings.pop(connection, None)
