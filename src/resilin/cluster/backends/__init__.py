"""Schedulers that start and stop the parts of jobs: five calls each."""
