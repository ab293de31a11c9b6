"""Virtual storage: blocks mapped into rows of addresses."""
