"""The room of what every door shares: keys, TLS, metrics and settings. It imports no web framework."""
