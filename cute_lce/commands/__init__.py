"""The commands of `cute-lce`, a file each: `add` declares the arguments, `run` does it and gives the exit
status."""
