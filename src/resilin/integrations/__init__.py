"""Where users live: resilin inside the loops of other frameworks.

Most users do not own their loop. Each module here makes one framework's loop elastic with a few
lines, and has no logic of its own: steps, weights, clocks and state are those of
`resilin.training`. A framework is imported with its module and never by `import resilin`. What a
framework is told to do and resilin cannot honour is refused.
"""
