"""Proofs that the two ends of a connection over a network know the secret of the same job.

On one machine the kernel says which process is at the other end. Over a network nobody does: the
worker sends a name and a random number, the authority answers with a number of its own and a
signature of both, and the worker with another signature. The secret itself is never sent, and a
signature is of no use in any other connection. What follows is neither signed nor encrypted, like
the gradients: the network between the machines has to be one that others cannot write to.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field, replace

from resilin.engine.live.wire import Message


@dataclass(frozen=True, slots=True)
class Greeting:
    """Words of the two ends of one connection, before either is believed."""

    name: str
    """The name that the worker claims."""
    asked: str = field(default_factory=lambda: secrets.token_hex(16))
    """The number of the worker."""
    answered: str = ""
    """The number of the authority; empty before it has answered."""

    def claim(self) -> Message:
        """The first message, of the worker."""
        return {"name": self.name, "nonce": self.asked}

    def challenged(self) -> Greeting:
        """The greeting with a number of the authority."""
        return replace(self, answered=secrets.token_hex(16))

    def challenge(self, secret: bytes) -> Message:
        """The second message, of the authority."""
        return {"challenge": self.answered, "proof": self._sign(secret, "authority")}

    def answer(self, secret: bytes, message: Message) -> Message:
        """The third message, of the worker, after it has checked the second one.

        Raises:
            ValueError: The other end does not know the secret.
        """
        challenge, proof = message.get("challenge"), message.get("proof")
        full = replace(self, answered=str(challenge))
        if not _equal(str(proof), full._sign(secret, "authority")):
            raise ValueError("it does not know the secret of the job")
        return {"proof": full._sign(secret, "worker")}

    def check(self, secret: bytes, proof: str) -> None:
        """Check the third message.

        Raises:
            ValueError: The other end does not know the secret.
        """
        if not _equal(proof, self._sign(secret, "worker")):
            raise ValueError(f"whoever claims to be {self.name} does not know the job's secret")

    def _sign(self, secret: bytes, side: str) -> str:
        text = "\n".join((side, self.asked, self.answered, self.name))
        return hmac.new(secret, text.encode(), "sha256").hexdigest()


def _equal(said: str, signature: str) -> bool:
    # As bytes: `hmac` raises a TypeError for text that is not ASCII.
    return hmac.compare_digest(said.encode(), signature.encode())
