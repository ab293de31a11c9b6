"""The command line: one file for each verb; `main` is the command.

Others may use
    main   the command `quire`
"""
