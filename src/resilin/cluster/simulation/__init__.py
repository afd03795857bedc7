"""Recorded workloads, run through a policy without any machine."""
