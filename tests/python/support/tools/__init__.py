"""Programs of those who develop mixedkv: models to measure with, and pages made from the code."""
