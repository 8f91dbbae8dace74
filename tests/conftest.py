"""What holds for every test: properties say what is true, not how fast a busy machine finds out."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("tailrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tailrace")
