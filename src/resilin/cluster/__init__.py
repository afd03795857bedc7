"""Many jobs on one cluster: who gets how many accelerators, and why.

The decision is a pure function of values (`job`, `node`, `decision`), tried on recorded workloads
by `simulation`, and carried out by `controller` through one of the `backends`. Nothing in it loads
torch.
"""
