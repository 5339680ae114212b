"""Guards that a request passes before the endpoints: connections, keys, limits, paths."""
