"""The scheduler without a model, and the engine's jobs, constraints and conversations."""
