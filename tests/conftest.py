"""Property tests: `make test` walks the same examples every time, `make test-slow` draws new ones (`--hypothesis-profile=explore`)."""
from hypothesis import HealthCheck, settings

# a busy machine may pause a test for longer than hypothesis takes for a healthy one
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("gate", settings.get_profile("explore"), derandomize=True)
settings.load_profile("gate")
