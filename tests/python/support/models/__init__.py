"""Models made on the spot, what they are asked, and what models of each family write."""
