"""Jobs: a request, its progress, and the state of its answer."""
