"""What a prompt starts from: the rows of a context, who may share them, and a sequence without an engine."""
