"""Programs that use and measure cute_lce on real work; not part of the installed package."""

import os

# The profiler that counts a CPU call's memory prints two lines a use unless this is set before torch is
# imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
