"""The controller: it sets the sizes of jobs on top of the scheduler that a site has.

All that it knows is a value (`state`), made by replaying a journal of records. One pure function
(`step`) compares it with what the backend reports, and returns the records to write and the acts to
carry out, in this order: a controller that is killed at any moment and started again finds what it
has announced. While no controller runs, jobs run on unchanged.
"""
