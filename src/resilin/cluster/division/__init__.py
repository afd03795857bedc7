"""Division of a cluster by value: sizes, their values, one choice for each job, and its place."""
