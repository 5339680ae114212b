"""What the benches measure with."""
