"""Guards that stand between a socket and the endpoints."""
