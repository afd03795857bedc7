import os

from hypothesis import HealthCheck, settings

# Examples are judged by what they return, not by how long a busy machine takes for them. Where the
# same tests run again, on other Pythons, fewer will do.
settings.register_profile(
    "resilin",
    deadline=None,
    max_examples=int(os.environ.get("EXAMPLES", 100)),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("resilin")
