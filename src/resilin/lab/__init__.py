"""The lab: reports of runs, replays of traces, and comparisons of scaling rules.

Reports and plots are made from events alone; replays and comparisons start scripts in separate
processes. Nothing here holds a tensor, and nothing imports torch.
"""
