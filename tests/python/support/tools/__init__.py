"""Programs of developers that tests use too: a random model, and pages made from the code."""
