"""Commands of `resilin sched`: many jobs on one cluster."""
