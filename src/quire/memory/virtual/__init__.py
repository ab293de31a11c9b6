"""Virtual storage: blocks mapped behind rows of addresses."""
