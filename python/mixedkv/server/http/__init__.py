"""What stands between a socket and the endpoints."""
