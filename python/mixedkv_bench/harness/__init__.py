"""Parts that the tests of `mixedkv bench` share: contexts, servers, clients, rows and tables."""
