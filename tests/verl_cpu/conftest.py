"""Nothing to collect here: these modules are loaded by veRL's processes."""

collect_ignore_glob = ["*.py"]
