"""The command line: one file per verb, `app` holds them together."""
