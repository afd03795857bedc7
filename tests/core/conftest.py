import os

from hypothesis import settings

# A busy machine is no failure. Where the same tests run again, on other Pythons, fewer will do.
settings.register_profile(
    "resilin", deadline=None, max_examples=int(os.environ.get("EXAMPLES", 100))
)
settings.load_profile("resilin")
