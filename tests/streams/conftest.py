import os

from hypothesis import HealthCheck, settings

# As for the core: a busy machine may take its time. An example reads a shard from all of its
# places.
settings.register_profile(
    "resilin-streams",
    deadline=None,
    max_examples=int(os.environ.get("EXAMPLES", 60)),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("resilin-streams")
