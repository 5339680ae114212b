"""A request at work: its progress, and the state of its answer."""
