"""The command ``hf-favorpp``: one file per subcommand, beside what they share.

The modules that do the work are imported within the commands that call them.
"""
