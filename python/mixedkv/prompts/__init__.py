"""Works on prompts as tokens: long texts, dropping their middle, starts of messages, repetitions."""
