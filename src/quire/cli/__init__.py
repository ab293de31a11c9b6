"""The command line: one file per verb, `app` holds them together.

Others may use
    app   the command `quire`
"""
