"""Integrations: resilin inside the loops of other frameworks.

Most users do not write their own loop. Each module here makes one framework's loop elastic with a
few lines, and has no logic of its own: steps, weights, clocks and state are those of
`resilin.training`. A framework is imported with its module and never by `import resilin`. Settings
of a framework that resilin does not support are rejected.
"""
