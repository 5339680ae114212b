"""A context without `Llama`, what its cache promises, and operations at random."""
