"""How calls are timed, what they are compared with, and what is noted of a measurement's origin, for the
commands and for bench/."""
