"""The lab: what became of a run, and what would become of another one.

Reports and plots are made from events alone; replays and comparisons start scripts as processes of
their own. Nothing here holds a tensor, and nothing loads torch by itself.
"""
