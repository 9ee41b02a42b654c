"""The `pdserve` command: subcommands that start the launchers, a chat client, and a report on the machine.

`main` dispatches; `help_pages` has the short help texts, `completion` the scripts for shells. A launcher is imported
only when its command runs, so help and version appear at once.
"""
