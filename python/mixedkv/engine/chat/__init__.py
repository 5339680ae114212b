"""Messages to prompts: templates and tokens."""
