"""Report: the events and numbers that a job reports."""
