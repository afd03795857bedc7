"""Membership of a job: engines for each launcher, process groups, and supervision."""
