"""Which jobs and sequences are in the next step; decided without a model."""
