"""The room of what every door shares: keys of tenants, TLS, metrics, settings. It imports no web framework."""
