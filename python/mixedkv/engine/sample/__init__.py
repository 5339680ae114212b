"""How the next token is chosen, and what is told of the others."""
