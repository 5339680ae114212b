"""Where the entries of a store lie."""
