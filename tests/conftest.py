"""What holds for every test, however the suite was started and however busy the machine is."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# Properties say what is true, not how fast a busy machine finds out.
settings.register_profile("tailrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tailrace")

# A shell without job control ignores Ctrl-C in what it starts with "&", and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
