"""The authority of a live job: who is in it, and the socket at which its members hear of that."""
