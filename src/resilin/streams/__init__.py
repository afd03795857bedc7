"""Streams: data that can be read in order only, divided into shards.

Nothing here loads torch. `AdaptiveDataLoader` takes anything that has the methods of
`protocol.Stream`; the other modules make such streams of files, of other streams, and of datasets
of other libraries.
"""
