"""Shards of a stream: who reads which samples, and how replicas agree on their ends."""
