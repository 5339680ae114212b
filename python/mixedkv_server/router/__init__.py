"""Several models: a process each, behind a router that starts and ends them."""
