"""What every test may rely on, however the suite was started."""

from __future__ import annotations

import signal

# A shell starts background jobs with SIGINT ignored, and Python then leaves it so; the tests of Ctrl-C need it heard.
signal.signal(signal.SIGINT, signal.default_int_handler)
