from hypothesis import HealthCheck, settings

# Examples are judged by what they return, not by how long a busy machine takes for them.
settings.register_profile("resilin", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("resilin")
